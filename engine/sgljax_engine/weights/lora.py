"""Merges LoRA pairs in a source of weights: W + scale A B (Hu et al., 2021).

The sum is computed in the source's own shape, in float32, before the rules of W take parts of it,
transpose it or cast it. So the rules of W map the sum, and W itself never changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sgljax_engine.weights.rules import LoraRule, indices_by_axis


class ArraySpec(Protocol):
    """Shape and dtype of a source parameter, known before any data moves."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of its axes."""
        ...

    @property
    def dtype(self) -> Any:
        """Dtype of its elements."""
        ...


class LoraTerm(NamedTuple):
    """The term added to one weight; see `LoraRule` for the fields."""

    a: str
    b: str
    scale: float
    in_axes: tuple[int, ...]


def lora_terms(
    rules: Sequence[LoraRule], source: Mapping[str, ArraySpec]
) -> tuple[dict[str, LoraTerm], list[str]]:
    """The pairs of a source by the names of their weights, and the problems with them.

    Args:
        rules: LoRA rules of an update.
        source: Specifications of all source parameters.

    Returns:
        Terms of the complete pairs, and a line for each problem.
    """
    terms: dict[str, LoraTerm] = {}
    problems: list[str] = []
    for rule in rules:
        if rule.weight not in source:
            problems.append(f"the LoRA pair of {rule.weight!r} lacks {rule.weight}")
            continue
        if rule.weight in terms:
            problems.append(f"{rule.weight!r} has two LoRA pairs")
            continue
        term, found = lora_term(rule, source)
        problems += found
        if term is not None:
            terms[rule.weight] = term
            problems += _misfits(rule, source)
    return terms, problems


def lora_term(rule: LoraRule, source: Mapping[str, ArraySpec]) -> tuple[LoraTerm | None, list[str]]:
    """The pair of a rule, checked without its weight; None and the problems if it is not a pair."""
    missing = [name for name in (rule.a, rule.b) if name not in source]
    if missing:
        return None, [f"the LoRA pair of {rule.weight!r} lacks {', '.join(missing)}"]
    a, b = source[rule.a], source[rule.b]
    where = f"the LoRA pair {rule.a!r} {list(a.shape)}, {rule.b!r} {list(b.shape)}"
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (a, b)):
        return None, [f"{where}: A and B must be of a floating-point type"]
    if not a.shape or not b.shape or a.shape[-1] != b.shape[0]:
        return None, [f"{where}: the ranks differ, {list(a.shape[-1:])} and {list(b.shape[:1])}"]
    ordered, num_axes = sorted(set(rule.in_axes)), len(a.shape) + len(b.shape) - 2
    if list(rule.in_axes) != ordered or not all(0 <= axis < num_axes for axis in ordered):
        return None, [f"{where}: in_axes {rule.in_axes} are no ascending axes of the weight"]
    if len(ordered) != len(a.shape) - 1:
        return None, [f"{where}: A must have the axes {rule.in_axes} of the weight and the rank"]
    return LoraTerm(rule.a, rule.b, rule.scale, rule.in_axes), []


def _misfits(rule: LoraRule, source: Mapping[str, ArraySpec]) -> list[str]:
    """Describes what in a pair does not fit its weight."""
    weight, a, b = (source[name].shape for name in (rule.weight, rule.a, rule.b))
    inputs = [weight[axis] for axis in rule.in_axes if axis < len(weight)]
    outputs = [size for axis, size in enumerate(weight) if axis not in rule.in_axes]
    if list(a[:-1]) == inputs and list(b[1:]) == outputs:
        return []
    return [
        f"the LoRA pair {rule.a!r} {list(a)}, {rule.b!r} {list(b)} of {rule.weight!r} "
        f"{list(weight)}: shapes do not fit, A must be {[*inputs, a[-1]]} and B "
        f"{[b[0], *outputs]}"
    ]


def merge(
    weight: jax.Array,
    a: jax.Array,
    b: jax.Array,
    term: LoraTerm,
    part: tuple[int, ...] | None = None,
    part_axes: tuple[int, ...] = (0,),
) -> jax.Array:
    """W + scale A B in float32, or one part of it. Traced by JAX.

    Products and sum are isolated from the surrounding code, so that a pair gives the same bits in
    every program.

    Args:
        weight: W in the source's shape.
        a: A.
        b: B.
        term: Says which axes A has, and the scale.
        part: Index on each of `part_axes` of W; None for all of W.
        part_axes: See `Rule.part_axis`.
    """
    axes = list(range(weight.ndim))
    in_axes = list(term.in_axes)
    out_axes = [axis for axis in axes if axis not in in_axes]
    for at, index in () if part is None else indices_by_axis(part, part_axes, weight.ndim):
        weight = lax.index_in_dim(weight, index, at, keepdims=False)
        if at in in_axes:
            a = lax.index_in_dim(a, index, in_axes.index(at), keepdims=False)
            in_axes.remove(at)
        else:
            b = lax.index_in_dim(b, index, 1 + out_axes.index(at), keepdims=False)
            out_axes.remove(at)
        axes.remove(at)
    a32 = a.astype(jnp.float32)
    b32 = lax.optimization_barrier(b.astype(jnp.float32) * jnp.float32(term.scale))
    product = jnp.tensordot(a32, b32, axes=1, precision=lax.Precision.HIGHEST)
    product = lax.optimization_barrier(product)
    order = [(in_axes + out_axes).index(axis) for axis in axes]
    return weight.astype(jnp.float32) + product.transpose(order)


def merge_on_host(weight: np.ndarray, a: np.ndarray, b: np.ndarray, term: LoraTerm) -> np.ndarray:
    """`merge` for whole numpy arrays, float32."""
    out_axes = [axis for axis in range(weight.ndim) if axis not in term.in_axes]
    product = np.tensordot(a.astype(np.float32), b.astype(np.float32) * np.float32(term.scale), 1)
    return weight.astype(np.float32) + product.transpose(np.argsort([*term.in_axes, *out_axes]))
