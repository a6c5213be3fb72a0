"""Products of few tokens on GPUs with the norms, gates and residuals around them in one kernel.

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

    Attributes:
        norms: Whether norms and gates are in the kernels of their products; if not, they are
            XLA's.
        adds: Whether products are added to the residual in their kernel; if not, XLA adds them.
        is_fixed: Whether a token has the same bits whatever it is computed with. Then they take any
            number of tokens.
        interpret: Run kernels as plain JAX operations on any device. Slow; for tests.
    """

    norms: bool = True
    adds: bool = True
    is_fixed: bool = False
    interpret: bool = False

    def serves(self, weights: Sequence[object], x: jax.Array) -> TypeGuard[Sequence[PlainWeight]]:
        """Whether it takes these: weights in the inputs' dtype or in int8, and few tokens."""
        if x.shape[0] > linear.MAX_TOKENS and not self.is_fixed:
            return False
        plain = [weight for weight in weights if isinstance(weight, PlainWeight)]
        return len(plain) == len(weights) and linear.is_served(x, [*map(_given, plain)])

    def norm_linears(
        self,
        x: jax.Array,
        norm: jax.Array,
        eps: float,
        offset: float,
        weights: Sequence[PlainWeight],
    ) -> tuple[jax.Array, ...]:
        """`rms_norm(x) @ W` of each weight; arguments as of `basic.rms_norm`."""
        made = linear.Norm(norm, eps, offset)
        given = [_given(weight) for weight in weights]
        return linear.norm_linears(x, made, given, is_fixed=self.is_fixed, interpret=self.interpret)

    def norm_gated(
        self,
        x: jax.Array,
        norm: jax.Array,
        eps: float,
        offset: float,
        weights: Sequence[PlainWeight],
        activation: Callable[[jax.Array], jax.Array],
    ) -> jax.Array:
        """`activation(rms_norm(x) @ gate) * (rms_norm(x) @ up)`, of these two weights."""
        (gate, up), made = map(_given, weights), linear.Norm(norm, eps, offset)
        return linear.norm_gated(
            x, made, gate, up, activation, is_fixed=self.is_fixed, interpret=self.interpret
        )

    def linear_add(self, x: jax.Array, weight: PlainWeight, residual: jax.Array) -> jax.Array:
        """`residual + x @ W`."""
        return linear.linear_add(
            x, _given(weight), residual, is_fixed=self.is_fixed, interpret=self.interpret
        )

    def serves_experts(self, weights: jax.Array, x: jax.Array) -> bool:
        """Whether `ragged_linear` takes these."""
        return ragged_linear.is_served(x, weights)

    def ragged_linear(self, weights: jax.Array, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """`x[t] @ W[e]` for each token t of each expert e, see `Kernels`."""
        return ragged_linear.ragged_linear(weights, x, group_sizes, interpret=self.interpret)


def _given(weight: PlainWeight) -> linear.Weight:
    """The weight as the kernels take it."""
    if isinstance(weight, Int8Weight):
        return linear.Scaled(weight.values, weight.scale)
    return weight


def fused_problem(target: Target) -> str | None:
    """Why the kernels cannot be used; None if they can."""
    if target.platform != "gpu":
        return f"it is for GPUs, the engine's devices are of kind {target.platform!r}"
    if target.num_tensor_shards > 1:
        return f"it is for one device, the engine shares weights over {target.num_tensor_shards}"
    return None
