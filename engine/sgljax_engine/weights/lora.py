"""LoRA pairs in a source of weights: W + scale A B (Hu et al., 2021), on its way to the engine.

The sum is made in the source's own shape, in float32, before the rules of W take parts of it,
transpose it or cast it. So whatever maps W maps the sum, and W itself is never changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sgljax_engine.weights.rules import LoraRule


class ArraySpec(Protocol):
    """What is known of a source parameter before any data moves."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its axes."""
        ...

    @property
    def dtype(self) -> Any:
        """Its elements."""
        ...


class LoraTerm(NamedTuple):
    """What is added to one weight; see `LoraRule` for the fields."""

    a: str
    b: str
    scale: float
    in_axes: tuple[int, ...]


def lora_terms(
    rules: Sequence[LoraRule], source: Mapping[str, ArraySpec]
) -> tuple[dict[str, LoraTerm], list[str]]:
    """The pairs of a source by the names of their weights, and what is wrong with them.

    Args:
        rules: LoRA rules of an update.
        source: Specifications of all source parameters.

    Returns:
        Terms of the pairs that are whole, and a line for each problem.
    """
    terms: dict[str, LoraTerm] = {}
    problems: list[str] = []
    for rule in rules:
        missing = [name for name in (rule.weight, rule.a, rule.b) if name not in source]
        if missing:
            problems.append(f"the LoRA pair of {rule.weight!r} lacks {', '.join(missing)}")
        elif rule.weight in terms:
            problems.append(f"{rule.weight!r} has two LoRA pairs")
        else:
            problems.extend(_shape_problems(rule, source))
            terms[rule.weight] = LoraTerm(rule.a, rule.b, rule.scale, rule.in_axes)
    return terms, problems


def _shape_problems(rule: LoraRule, source: Mapping[str, ArraySpec]) -> list[str]:
    weight, a, b = (source[name].shape for name in (rule.weight, rule.a, rule.b))
    where = (
        f"the LoRA pair {rule.a!r} {list(a)}, {rule.b!r} {list(b)} of {rule.weight!r} "
        f"{list(weight)}"
    )
    if not all(jnp.issubdtype(source[name].dtype, jnp.floating) for name in (rule.a, rule.b)):
        return [f"{where}: A and B must be of a floating-point type"]
    ordered = sorted(set(rule.in_axes))
    if list(rule.in_axes) != ordered or not all(0 <= axis < len(weight) for axis in ordered):
        return [f"{where}: in_axes {rule.in_axes} are no ascending axes of the weight"]
    inputs = [weight[axis] for axis in rule.in_axes]
    outputs = [size for axis, size in enumerate(weight) if axis not in rule.in_axes]
    if not a or not b or a[-1] != b[0]:
        return [f"{where}: the ranks differ, {list(a[-1:])} and {list(b[:1])}"]
    if list(a[:-1]) != inputs or list(b[1:]) != outputs:
        return [
            f"{where}: shapes do not fit, A must be {[*inputs, a[-1]]} and B {[b[0], *outputs]}"
        ]
    return []


def merge(
    weight: jax.Array,
    a: jax.Array,
    b: jax.Array,
    term: LoraTerm,
    part: int | None = None,
    part_axis: int = 0,
) -> jax.Array:
    """W + scale A B in float32, or one part of it. To be traced.

    Products and sum are kept apart from what is around them, so that the same pair gives the same
    bits in each program.

    Args:
        weight: W, as the source has it.
        a: A.
        b: B.
        term: Says which axes A has, and the scale.
        part: Index on `part_axis` of W; None for all of W.
        part_axis: See `Rule.part_axis`.
    """
    axes = list(range(weight.ndim))
    in_axes = list(term.in_axes)
    out_axes = [axis for axis in axes if axis not in in_axes]
    if part is not None:
        at = axes[part_axis]
        weight = lax.index_in_dim(weight, part, part_axis, keepdims=False)
        if at in in_axes:
            a = lax.index_in_dim(a, part, in_axes.index(at), keepdims=False)
            in_axes.remove(at)
        else:
            b = lax.index_in_dim(b, part, 1 + out_axes.index(at), keepdims=False)
            out_axes.remove(at)
        axes.remove(at)
    a32 = a.astype(jnp.float32)
    b32 = lax.optimization_barrier(b.astype(jnp.float32) * jnp.float32(term.scale))
    product = jnp.tensordot(a32, b32, axes=1, precision=lax.Precision.HIGHEST)
    product = lax.optimization_barrier(product)
    order = [(in_axes + out_axes).index(axis) for axis in axes]
    return weight.astype(jnp.float32) + product.transpose(order)


def merge_on_host(weight: np.ndarray, a: np.ndarray, b: np.ndarray, term: LoraTerm) -> np.ndarray:
    """`merge` of whole numpy arrays, float32."""
    out_axes = [axis for axis in range(weight.ndim) if axis not in term.in_axes]
    product = np.tensordot(a.astype(np.float32), b.astype(np.float32) * np.float32(term.scale), 1)
    return weight.astype(np.float32) + product.transpose(np.argsort([*term.in_axes, *out_axes]))
