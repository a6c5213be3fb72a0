"""Specifications of a weight sync: engine parameters, source arrays, and the steps between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sgljax_engine.errors import WeightSyncError
from sgljax_engine.weights.forms import Form, Quantized
from sgljax_engine.weights.lora import LoraTerm
from sgljax_engine.weights.rules import Hook

Weights = dict[str, jax.Array]

Sources = tuple[Any, ...]
"""Source arrays that one step reads."""


class TargetSpec(NamedTuple):
    """One engine parameter as weight sync sees it.

    The logical shape is the one that rules map onto ([in, out] for projections); `dtype` is that of
    the stored parameter. `alias` is another name that rules may use for it.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    form: Form
    sharding: jax.sharding.Sharding
    alias: str
    quantized: Quantized | None = None

    @property
    def source_shape(self) -> tuple[int, ...]:
        """The logical shape of the weight that it is made from."""
        return self.shape if self.quantized is None else self.quantized.shape

    @property
    def stored(self) -> jax.ShapeDtypeStruct:
        """The stored form: physical shape, dtype and sharding."""
        return jax.ShapeDtypeStruct(self.stored_shape, self.dtype, sharding=self.sharding)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.form.stored_shape(self.shape)

    @property
    def num_outputs(self) -> int | None:
        """Outputs of a weight in panels; None of others."""
        if not self.form.is_packed:
            return None
        return self.shape[-1 if self.form is Form.PANELS else -2]


class SourceSpec(NamedTuple):
    """Shape and dtype of one source parameter."""

    shape: tuple[int, ...]
    dtype: jnp.dtype


class Step(NamedTuple):
    """How one engine parameter is made.

    In this order: LoRA pair, part, transpose, hook, stack, reshape, cast, physical layout. The
    sources of a stacked parameter are in order, `source` the first.
    """

    source: str
    target: str
    transpose: tuple[int, ...] | None
    hook: Hook | None
    part: tuple[int, ...] | None
    part_axes: tuple[int, ...] = (0,)
    num_parts: int | None = None
    lora: LoraTerm | None = None
    stacked: tuple[str, ...] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of its sources: a weight and the pair added to it, or those stacked."""
        pair = () if self.lora is None else (self.lora.a, self.lora.b)
        return (*(self.stacked or (self.source,)), *pair)

    def without_names(self) -> Step:
        """The same step without names."""
        lora = None if self.lora is None else self.lora._replace(a="", b="")
        stacked = ("",) * len(self.stacked)
        return self._replace(source="", target="", lora=lora, stacked=stacked)


def source_spec(source: Mapping[str, Any]) -> dict[str, SourceSpec]:
    """Shapes and dtypes of named arrays; raises WeightSyncError for a leaf that is no array."""
    spec = {}
    for name, array in source.items():
        try:
            spec[name] = SourceSpec(tuple(array.shape), jnp.dtype(array.dtype))
        except (AttributeError, TypeError):
            hint = "; jax.numpy.from_dlpack makes one of it" if _is_foreign(array) else ""
            raise WeightSyncError(
                f"source parameter {name!r} must be an array, got {type(array).__name__}{hint}"
            ) from None
    return spec


def _is_foreign(array: Any) -> bool:
    """Whether it is another framework's array, such as a torch.Tensor."""
    return hasattr(array, "__dlpack__")
