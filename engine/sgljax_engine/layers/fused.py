"""Products of few tokens on GPUs with gates and residuals in one kernel.

Imported where such kernels may run: Pallas takes a tenth of a second to import.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeGuard

import jax

from sgljax_engine.kernels.gpu import linear, ragged_linear
from sgljax_engine.layers.int8 import Int8Weight
from sgljax_engine.layers.target import Target

PlainWeight = jax.Array | Int8Weight
"""[in, out]."""


@dataclasses.dataclass(frozen=True)
class FusedProducts:
    """The kernels of `kernels.gpu.linear`. Static and hashable; activations tokens first.

    `joins`: products of one input are one kernel, with their gate; else XLA's. `adds`: products are
    added to the residual in their kernel; else by XLA. `is_fixed`: a token has the same bits
    whatever it is computed with, and they take any number of tokens. `interpret` runs plain JAX
    operations on any device; slow, for tests.
    """

    joins: bool = True
    adds: bool = True
    is_fixed: bool = False
    interpret: bool = False

    def serves(self, weights: Sequence[object], x: jax.Array) -> TypeGuard[Sequence[PlainWeight]]:
        if x.shape[0] > linear.MAX_TOKENS and not self.is_fixed:
            return False
        plain = [weight for weight in weights if isinstance(weight, PlainWeight)]
        return len(plain) == len(weights) and linear.is_served(x, [*map(_given, plain)])

    def linears(self, x: jax.Array, weights: Sequence[PlainWeight]) -> tuple[jax.Array, ...]:
        given = [_given(weight) for weight in weights]
        return linear.linears(x, given, is_fixed=self.is_fixed, interpret=self.interpret)

    def gated(
        self,
        x: jax.Array,
        weights: Sequence[PlainWeight],
        activation: Callable[[jax.Array], jax.Array],
    ) -> jax.Array:
        gate, up = map(_given, weights)
        return linear.gated(
            x, gate, up, activation, is_fixed=self.is_fixed, interpret=self.interpret
        )

    def linear_add(self, x: jax.Array, weight: PlainWeight, residual: jax.Array) -> jax.Array:
        return linear.linear_add(
            x, _given(weight), residual, is_fixed=self.is_fixed, interpret=self.interpret
        )

    def serves_experts(self, weights: jax.Array, x: jax.Array) -> bool:
        return ragged_linear.is_served(x, weights)

    def ragged_linear(self, weights: jax.Array, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
        return ragged_linear.ragged_linear(weights, x, group_sizes, interpret=self.interpret)


def _given(weight: PlainWeight) -> linear.Weight:
    if isinstance(weight, Int8Weight):
        return linear.Scaled(weight.values, weight.scale)
    return weight


HOPPER = "9.0"
"""Compute capability of the GPUs on which the kernels were measured. On others their tiles may need
more shared memory than there is."""


def fused_problem(target: Target) -> str | None:
    if target.platform != "gpu":
        return f"it is for GPUs, the engine's devices are of kind {target.platform!r}"
    if target.num_tensor_shards > 1:
        return f"it is for one device, the engine shares weights over {target.num_tensor_shards}"
    return None
