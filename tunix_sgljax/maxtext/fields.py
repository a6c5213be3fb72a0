"""Reads the fields of MaxText's config, and refuses values for which the engine has nothing."""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Any

import numpy as np

from sgljax_engine import UnsupportedModelError

CONFIG_MODULES = ("maxtext.configs.types", "maxtext.configs.pyconfig")
"""Modules of the classes of MaxText's configs."""

HYBRIDS = ("qwen3_next", "qwen3_5")
"""Decoder blocks with gated delta nets."""

_FLOATS = ("float32", "bfloat16", "float16")

_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "dtype": _FLOATS,
    "fused_mlp": (False,),
    "fused_qkv": (False,),
    "mhc_expansion_rate": (1,),
    "moba": (False,),
    "mtp_num_layers": (0,),
    "qk_norm_with_scale": (True,),
    "quantization": ("", None),
    "rope_min_timescale": (1,),
    "trainable_position_size": (-1, 0),
    "use_multimodal": (False,),
    "use_qwix_quantization": (False,),
    "use_untrainable_positional_embedding": (False,),
    "using_pipeline_parallelism": (False, None),
    "weight_dtype": _FLOATS,
}
"""Fields of every model that the engine can compute with these values alone."""


def is_maxtext_config(config: Any) -> bool:
    """Whether it is a config of MaxText, such as `MaxTextConfig` or `RLConfig`."""
    return any(cls.__module__ in CONFIG_MODULES for cls in type(config).__mro__)


def get(config: Any, name: str) -> Any:
    """A field's value, of an enumeration the plain value."""
    try:
        value = getattr(config, name)
    except AttributeError:
        raise UnsupportedModelError(
            f"MaxText's config has no field {name!r}; this reads configs of maxtext 0.2.5"
        ) from None
    if isinstance(value, np.dtype):  # as pyconfig.initialize gives them
        return value.name
    return value.value if isinstance(value, enum.Enum) else value


def require(config: Any, name: str, supported: Collection[Any], reason: str = "") -> None:
    """Refuses a field with another value than those that are supported."""
    value = get(config, name)
    if value not in supported:
        listed = " or ".join(repr(each) for each in supported)
        raise UnsupportedModelError(
            f"MaxText's {name}={value!r} is not supported, only {listed}{reason}"
        )


def check_fields(config: Any) -> None:
    for name, supported in _SUPPORTED.items():
        require(config, name, supported)
