"""What a step computes, from its source arrays to an engine parameter. Traced by JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

import sgljax_cpu
from sgljax_engine.weights.finite import is_finite
from sgljax_engine.weights.forms import Form
from sgljax_engine.weights.lora import merge
from sgljax_engine.weights.rules import indices_by_axis
from sgljax_engine.weights.specs import Sources, Step, TargetSpec

_NATIVE = {"float32", "bfloat16", "float16"}
"""Dtypes that the JIT-compiled CPU kernels read and write."""


def transform(sources: Sources, step: Step) -> jax.Array:
    """The sources as one array with the axes that the rule gives it, before reshape and cast."""
    if step.stacked:
        return jnp.stack([map_axes(x, step) for x in sources])
    if step.lora is None:
        return map_axes(sources[0], step)
    weight, a, b = sources
    merged = merge(weight, a, b, step.lora, step.part, step.part_axes)
    return map_axes(merged, step._replace(part=None))


def map_axes(x: jax.Array, step: Step) -> jax.Array:
    """A source's part, transposed, after the hook."""
    if step.part is not None and step.num_parts is not None:
        (part,), (axis,) = step.part, step.part_axes
        size = x.shape[axis] // step.num_parts
        x = lax.slice_in_dim(x, part * size, (part + 1) * size, axis=axis)
    elif step.part is not None:
        for axis, index in indices_by_axis(step.part, step.part_axes, x.ndim):
            x = lax.index_in_dim(x, index, axis, keepdims=False)
    if step.transpose is not None:
        x = jnp.transpose(x, step.transpose)
    return step.hook(x) if step.hook is not None else x


def to_logical(sources: Sources, step: Step, target: TargetSpec) -> jax.Array:
    """The engine parameter in its logical shape."""
    weight = transform(sources, step).reshape(target.source_shape)
    return (
        weight.astype(target.dtype)
        if target.quantized is None
        else target.quantized.quantize(weight)
    )


def to_stored(
    sources: Sources, step: Step, target: TargetSpec, is_native: bool
) -> tuple[jax.Array, jax.Array]:
    """The engine parameter in its stored form, and whether it is finite.

    Copies keep JAX from returning the source itself.
    """
    if target.quantized is not None:
        weight = transform(sources, step).reshape(target.source_shape)
        return jnp.copy(target.form.store(target.quantized.quantize(weight))), is_finite(weight)
    # Rows of outputs, which a rule transposes.
    is_by_output = step.transpose in ((1, 0), (0, 2, 1)) and step.hook is None
    if is_by_output and step.stacked and target.form is not Form.LOGICAL:
        step = step._replace(transpose=None)
        *stacked, num_inputs, num_outputs = target.shape
        return _stored_rows(
            transform(sources, step).reshape(*stacked, num_outputs, num_inputs), target, is_native
        )
    x = transform(sources, step)
    is_copied = target.form is Form.LOGICAL and x.dtype == target.dtype == jnp.float32
    if is_native and is_copied and step.part is None:  # a kernel would need the part sliced first
        return sgljax_cpu.copy(x.reshape(target.shape))
    if is_native and _is_packed_natively(x, target):
        if target.form is Form.TABLE_PANELS:
            return sgljax_cpu.pack(x.reshape(target.shape), target.dtype, is_by_output=True)
        if is_by_output and x.ndim == len(target.shape):  # XLA drops both transposes
            return sgljax_cpu.pack(x.swapaxes(-1, -2), target.dtype, is_by_output=True)
        return sgljax_cpu.pack(x.reshape(target.shape), target.dtype, is_by_output=False)
    stored = jnp.copy(target.form.store(x.reshape(target.shape).astype(target.dtype)))
    return stored, is_finite(x.astype(target.dtype))  # in source order: sequential reads


def _is_packed_natively(x: jax.Array, target: TargetSpec) -> bool:
    return target.form.is_packed and {x.dtype.name, target.dtype.name} <= _NATIVE


def _stored_rows(x: jax.Array, target: TargetSpec, is_native: bool) -> tuple[jax.Array, jax.Array]:
    """As `to_stored`, from rows of outputs [..., out, in]."""
    if is_native and target.form is Form.PANELS and _is_packed_natively(x, target):
        return sgljax_cpu.pack(x, target.dtype, is_by_output=True)
    cast = x.astype(target.dtype)
    return jnp.copy(target.form.store(cast.swapaxes(-1, -2))), is_finite(cast)
