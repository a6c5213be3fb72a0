"""Reads Hugging Face's config.json, as transformers 4 and 5 write it; shared by all models.

A setting known to change a model's results is either read or refused by name. Settings that only
concern training, generation or speed, or that no model here has, are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgljax_engine.errors import InvalidConfigError, UnsupportedModelError
from sgljax_engine.model_config import (
    AttentionConfig,
    LinearAttentionConfig,
    Llama3Scaling,
    ModelConfig,
    MoEConfig,
    RopeConfig,
)

HfConfig = Mapping[str, Any]
"""The contents of a config.json."""

_ONLY_SUPPORTED: dict[str, Any] = {
    "attention_bias": False,
    "dual_chunk_attention_config": None,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "use_bidirectional_attention": False,
    "use_sliding_window": False,
}

_OF_THE_WHOLE = ("eos_token_id", "quantization_config")
"""Settings that a multimodal model's config.json has outside `text_config`, where they decide."""

_ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "proportional": ("partial_rotary_factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}

_PLAIN_ATTENTION = AttentionConfig()

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
"""The entries of `layer_types`."""


def require(hf: HfConfig, name: str) -> Any:
    """The value of a setting; InvalidConfigError when it is absent or null."""
    if hf.get(name) is None:
        raise InvalidConfigError(f"config.json has no {name!r}")
    return hf[name]


def text_config(hf: HfConfig, architecture: str, defaults: HfConfig) -> HfConfig:
    """The config of the language model inside a multimodal model's config.json.

    Args:
        hf: The config.json, with the language model under `text_config`.
        architecture: Architecture of the language model.
        defaults: Settings that `text_config` may leave out, as transformers' class has them.

    Returns:
        The contents of a config.json of the language model alone.
    """
    text = {**defaults, **require(hf, "text_config"), "architectures": [architecture]}
    outer = {name: hf[name] for name in _OF_THE_WHOLE if hf.get(name) is not None}
    return {"tie_word_embeddings": hf.get("tie_word_embeddings"), **text, **outer}


def require_any(hf: HfConfig, *names: str) -> Any:
    """The first of several names of one setting that is there; as `require`, by the first name."""
    return require(hf, next((name for name in names if hf.get(name) is not None), names[0]))


def check_settings(hf: HfConfig, **supported: Any) -> None:
    """Refuses settings that no model implements, and settings in `supported` with another value.

    An absent or null setting passes: transformers then takes its default, which must be the
    supported value.

    Raises:
        UnsupportedModelError: names the setting, its value and the implemented value.
    """
    for name, only in {**_ONLY_SUPPORTED, **supported}.items():
        value = hf.get(name)
        if value is not None and value != only:
            raise UnsupportedModelError(f"{name}={value!r} is not supported, only {only!r}")


def check_full_attention(hf: HfConfig) -> None:
    """Refuses `layer_types` other than full attention."""
    check_layer_types(hf, FULL)


def check_layer_types(hf: HfConfig, only: str) -> None:
    """Refuses `layer_types` other than `only`, for models whose layers are all of one type."""
    for kind in hf.get("layer_types") or ():
        if kind != only:
            raise UnsupportedModelError(f"layer_types {kind!r} is not supported, only {only!r}")


def sliding_layers(hf: HfConfig, pattern: int) -> tuple[bool, ...]:
    """Whether each layer slides: from `layer_types`, else all but every pattern-th.

    Raises:
        UnsupportedModelError: for another type of layer.
        InvalidConfigError: when the number of types differs from that of layers.
    """
    return _layers_of_kind(hf, SLIDING, pattern)


def linear_layers(hf: HfConfig, pattern: int) -> tuple[bool, ...]:
    """Whether each layer has linear attention; arguments and errors are as of `sliding_layers`."""
    return _layers_of_kind(hf, LINEAR, pattern)


def _layers_of_kind(hf: HfConfig, kind: str, pattern: int) -> tuple[bool, ...]:
    num_layers = require(hf, "num_hidden_layers")
    kinds = hf.get("layer_types")
    if kinds is None:
        return tuple((i + 1) % pattern != 0 for i in range(num_layers))
    unknown = set(kinds) - {kind, FULL}
    if unknown:
        raise UnsupportedModelError(
            f"layer_types {sorted(unknown)[0]!r} is not supported, only {kind!r} and {FULL!r}"
        )
    if len(kinds) != num_layers:
        raise InvalidConfigError(
            f"layer_types must name num_hidden_layers ({num_layers}) types, got {len(kinds)}"
        )
    return tuple(each == kind for each in kinds)


def read_rope(hf: HfConfig, default_theta: float | None = None) -> RopeConfig:
    """The rotary embedding of a model that has the same one in all layers.

    Args:
        hf: The config.json.
        default_theta: The base if the config names none; None refuses such a config.
    """
    # transformers 4 writes rope_theta at the top level and the rest, if any, in rope_scaling;
    # transformers 5 writes everything in rope_parameters.
    nested = hf.get("rope_parameters") or {}
    theta = nested.get("rope_theta", hf.get("rope_theta"))
    return parse_rope(hf.get("rope_scaling") or nested, default_theta if theta is None else theta)


def parse_rope(settings: HfConfig, theta: float | None) -> RopeConfig:
    """Parses one rotary embedding.

    Args:
        settings: `rope_scaling` of transformers 4, or (a part of) `rope_parameters` of 5.
        theta: The base, unless the settings have one.

    Raises:
        UnsupportedModelError: for a rope type, or a setting of it, that is not implemented.
        InvalidConfigError: for a missing setting.
    """
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in _ROPE_FIELDS:
        raise UnsupportedModelError(
            f"rope_type={kind!r} is not supported, only {', '.join(map(repr, _ROPE_FIELDS))}"
        )
    known = {"rope_type", "type", "rope_theta", *_ROPE_FIELDS[kind]}
    if kind == "proportional":
        known.add("factor")
    for name, value in settings.items():
        if name not in known and value is not None:
            raise UnsupportedModelError(f"{name}={value!r} is not supported for rope_type={kind!r}")
    theta = settings.get("rope_theta", theta)
    if theta is None:
        raise InvalidConfigError(
            "config.json has no 'rope_theta', neither top-level nor in rope_parameters"
        )
    fields = {name: require(settings, name) for name in _ROPE_FIELDS[kind]}
    if kind == "linear":
        return RopeConfig(theta=float(theta), linear_factor=float(fields["factor"]))
    if kind == "proportional":
        fraction, factor = fields["partial_rotary_factor"], settings.get("factor") or 1.0
        return RopeConfig(
            theta=float(theta), linear_factor=float(factor), rotary_fraction=float(fraction)
        )
    if kind == "llama3":
        length = fields.pop("original_max_position_embeddings")
        scaling = Llama3Scaling(**fields, original_context_length=length)
        return RopeConfig(theta=float(theta), llama3=scaling)
    return RopeConfig(theta=float(theta))


def dense_config(
    hf: HfConfig,
    *,
    rope: RopeConfig,
    tied_by_default: bool,
    attention: AttentionConfig = _PLAIN_ATTENTION,
    final_logit_softcap: float | None = None,
    per_layer_input_size: int = 0,
    shared_kv_intermediate_size: int | None = None,
    moe: MoEConfig | None = None,
    linear_attention: LinearAttentionConfig | None = None,
) -> ModelConfig:
    """Builds the config from the fields that all models name alike, and those given.

    Raises:
        InvalidConfigError: for a missing or wrong field.
    """
    hidden_size, num_heads = require(hf, "hidden_size"), require(hf, "num_attention_heads")
    tied = hf.get("tie_word_embeddings")
    return ModelConfig(
        architecture=require(hf, "architectures")[0],
        vocab_size=require(hf, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=require(hf, "intermediate_size"),
        num_layers=require(hf, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=hf.get("num_key_value_heads") or num_heads,
        head_dim=hf.get("head_dim") or hidden_size // num_heads,
        rope=rope,
        rms_norm_eps=float(require(hf, "rms_norm_eps")),
        tie_word_embeddings=tied_by_default if tied is None else bool(tied),
        context_length=require(hf, "max_position_embeddings"),
        eos_token_ids=as_ids(hf.get("eos_token_id")),
        attention=attention,
        final_logit_softcap=final_logit_softcap,
        per_layer_input_size=per_layer_input_size,
        shared_kv_intermediate_size=shared_kv_intermediate_size,
        moe=moe,
        linear_attention=linear_attention,
    )


def as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """`eos_token_id`, which may be one id, several or none."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
