"""Merges LoRA pairs in a source of weights: W + scale A B (Hu et al., 2021).

The sum is computed in the source's own shape, in float32, before the rules of W take parts of it,
transpose it or cast it. So the rules of W map the sum, and W itself never changes.
"""

from __future__ import annotations

import math
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
    a: str
    b: str
    scale: float
    in_axes: tuple[int, ...]
    stacked_axes: tuple[int, ...] = ()

    def out_axes(self, num_axes: int) -> list[int]:
        """The other axes of W, which has this many."""
        taken = {*self.in_axes, *self.stacked_axes}
        return [axis for axis in range(num_axes) if axis not in taken]

    def shapes(self, weight: Sequence[int], rank: int) -> tuple[list[int], list[int]]:
        """Shapes of A and B with an axis for each of W's, which has this shape."""
        inputs, stacked, outputs = (
            [weight[axis] for axis in axes]
            for axes in (self.in_axes, self.stacked_axes, self.out_axes(len(weight)))
        )
        return [*inputs, *stacked, rank], [rank, *stacked, *outputs]


def lora_terms(
    rules: Sequence[LoraRule], source: Mapping[str, ArraySpec]
) -> tuple[dict[str, LoraTerm], list[str]]:
    """Terms of the complete pairs by the names of their weights, and a line for each problem."""
    terms: dict[str, LoraTerm] = {}
    problems: list[str] = []
    for rule in rules:
        if rule.weight not in source:
            problems.append(f"the LoRA pair of {rule.weight!r} lacks {rule.weight}")
            continue
        if rule.weight in terms:
            problems.append(f"{rule.weight!r} has two LoRA pairs")
            continue
        term, found = _term(rule, source) if _has_own_axes(rule) else lora_term(rule, source)
        problems += found
        if term is not None:
            terms[rule.weight] = term
            problems += _misfits(rule, term, source)
    return terms, problems


def _has_own_axes(rule: LoraRule) -> bool:
    """Whether the axes of A and B do not give those of W."""
    return bool(rule.stacked_axes) or rule.is_merged


def lora_term(rule: LoraRule, source: Mapping[str, ArraySpec]) -> tuple[LoraTerm | None, list[str]]:
    """The pair of a rule, checked without its weight; None and the problems if it is not a pair."""
    term, problems = _term(rule, source)
    if term is None:
        return None, problems
    a, b = source[rule.a], source[rule.b]
    where = f"the LoRA pair {rule.a!r} {list(a.shape)}, {rule.b!r} {list(b.shape)}"
    if _has_own_axes(rule):
        return None, [f"{where}: with stacked or merged axes it can only be merged into its weight"]
    ordered, num_axes = sorted(set(rule.in_axes)), len(a.shape) + len(b.shape) - 2
    if list(rule.in_axes) != ordered or not all(0 <= axis < num_axes for axis in ordered):
        return None, [f"{where}: in_axes {rule.in_axes} are no ascending axes of the weight"]
    if len(ordered) != len(a.shape) - 1:
        return None, [f"{where}: A must have the axes {rule.in_axes} of the weight and the rank"]
    return term, []


def _term(rule: LoraRule, source: Mapping[str, ArraySpec]) -> tuple[LoraTerm | None, list[str]]:
    """The pair of a rule, whose axes nothing has checked yet."""
    missing = [name for name in (rule.a, rule.b) if name not in source]
    if missing:
        return None, [f"the LoRA pair of {rule.weight!r} lacks {', '.join(missing)}"]
    a, b = source[rule.a], source[rule.b]
    where = f"the LoRA pair {rule.a!r} {list(a.shape)}, {rule.b!r} {list(b.shape)}"
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (a, b)):
        return None, [f"{where}: A and B must be of a floating-point type"]
    if not a.shape or not b.shape or a.shape[-1] != b.shape[0]:
        return None, [f"{where}: the ranks differ, {list(a.shape[-1:])} and {list(b.shape[:1])}"]
    return LoraTerm(rule.a, rule.b, rule.scale, rule.in_axes, rule.stacked_axes), []


def _misfits(rule: LoraRule, term: LoraTerm, source: Mapping[str, ArraySpec]) -> list[str]:
    weight, a, b = (source[name].shape for name in (rule.weight, rule.a, rule.b))
    where = f"the LoRA pair {rule.a!r} {list(a)}, {rule.b!r} {list(b)} of {rule.weight!r}"
    axes = [*rule.in_axes, *rule.stacked_axes]
    if len(set(axes)) < len(axes) or not all(0 <= axis < len(weight) for axis in axes):
        return [f"{where} {list(weight)}: in_axes and stacked_axes {axes} are no axes of it"]
    wanted_a, wanted_b = term.shapes(weight, a[-1])
    if rule.is_merged:
        stacked = [weight[axis] for axis in rule.stacked_axes]
        inputs, outputs = wanted_a[: len(rule.in_axes)], wanted_b[1 + len(stacked) :]
        wanted_a = [math.prod(inputs), *stacked, a[-1]]
        wanted_b = [a[-1], *stacked, math.prod(outputs)]
    if list(a) == wanted_a and list(b) == wanted_b:
        return []
    return [f"{where} {list(weight)}: shapes do not fit, A must be {wanted_a} and B {wanted_b}"]


def merge(
    weight: jax.Array,
    a: jax.Array,
    b: jax.Array,
    term: LoraTerm,
    part: tuple[int, ...] | None = None,
    part_axes: tuple[int, ...] = (0,),
) -> jax.Array:
    """W + scale A B in float32, or a part of it by index on each of `part_axes`. Traced by JAX.

    Products and sum are isolated from the surrounding code, so that a pair gives the same bits in
    every program.
    """
    shape_a, shape_b = term.shapes(weight.shape, a.shape[-1])
    a, b = a.reshape(shape_a), b.reshape(shape_b)
    axes, stacked = list(range(weight.ndim)), list(term.stacked_axes)
    in_axes, out_axes = list(term.in_axes), term.out_axes(weight.ndim)
    for at, index in () if part is None else indices_by_axis(part, part_axes, weight.ndim):
        weight = lax.index_in_dim(weight, index, at, keepdims=False)
        if at not in out_axes:
            a = lax.index_in_dim(a, index, [*in_axes, *stacked].index(at), keepdims=False)
        if at not in in_axes:
            b = lax.index_in_dim(b, index, 1 + [*stacked, *out_axes].index(at), keepdims=False)
        for group in (axes, in_axes, stacked, out_axes):
            if at in group:
                group.remove(at)
    a32 = a.astype(jnp.float32)
    b32 = lax.optimization_barrier(b.astype(jnp.float32) * jnp.float32(term.scale))
    first, num = len(in_axes), len(stacked)
    batched = (range(first, first + num), range(1, 1 + num))
    dimensions = (((a32.ndim - 1,), (0,)), batched)
    product = lax.dot_general(a32, b32, dimensions, precision=lax.Precision.HIGHEST)
    product = lax.optimization_barrier(product)
    order = [[*stacked, *in_axes, *out_axes].index(axis) for axis in axes]
    return weight.astype(jnp.float32) + product.transpose(order)


def merge_on_host(weight: np.ndarray, a: np.ndarray, b: np.ndarray, term: LoraTerm) -> np.ndarray:
    """`merge` for whole numpy arrays, float32."""
    shape_a, shape_b = term.shapes(weight.shape, a.shape[-1])
    axes, out_axes = list(range(weight.ndim)), term.out_axes(weight.ndim)
    rank = len(axes)
    operands: list[Any] = [
        a.astype(np.float32).reshape(shape_a),
        [*term.in_axes, *term.stacked_axes, rank],
        b.astype(np.float32).reshape(shape_b) * np.float32(term.scale),
        [rank, *term.stacked_axes, *out_axes],
        axes,
    ]
    product = np.einsum(*operands, optimize=True)  # as matrix products, where it can
    return weight.astype(np.float32) + product
