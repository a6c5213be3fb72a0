"""Computations on each token besides attention: one class per backend, and the choice of one.

A backend multiplies with weights, normalises, rotates and looks embeddings up. Models reach it
through `ModelContext`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

import sgljax_cpu
from sgljax_engine.layers import delta_net
from sgljax_engine.layers.basic import embed, linear, rms_norm, unembed
from sgljax_engine.layers.delta_net import Heads, TokenTerms
from sgljax_engine.layers.int8 import (
    SCALE_SUFFIX,
    Int8Weight,
    int8_embed,
    int8_linear,
    int8_unembed,
)
from sgljax_engine.layers.ragged import linear_in_blocks
from sgljax_engine.layers.rope import apply_rope, constant_timescales, rope_tables
from sgljax_engine.layers.target import Target, require_backend

if TYPE_CHECKING:
    from sgljax_engine.layers.fused import FusedProducts
    from sgljax_engine.layers.tpu import TpuHeads

Weight = jax.Array | sgljax_cpu.Panels | Int8Weight
"""A weight as the backend stores it."""


class Kernels(Protocol):
    """The computations of a backend. Hashable: programs are compiled for it."""

    @property
    def mesh(self) -> jax.sharding.AbstractMesh | None:
        """Axes over which weights are sharded; None on a single device."""
        ...

    @property
    def fused(self) -> FusedProducts | None:
        """Products with what is around them."""
        ...

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a token has the same bits whatever it is computed with."""
        ...

    def activation_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        """Dtype of activations, with weights in `dtype`."""
        ...

    def weights(self, params: Mapping[str, jax.Array]) -> Mapping[str, Weight]:
        """The weights of a program as the other functions take them."""
        ...

    def fuse(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function of arrays, compiled as the backend runs it best; called inside programs."""
        ...

    def linear(self, weight: Weight, x: jax.Array) -> jax.Array:
        """`x @ W` over features.

        Args:
            weight: [in, out], or panels.
            x: [T, in].
        """
        ...

    def unembed(self, table_VD: Weight, hidden_TD: jax.Array) -> jax.Array:
        """Logits [T, V] float32."""
        ...

    def embed(self, table_VD: Weight, ids_T: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Rows of the embedding table [T, D]. Ids must be in range.

        Args:
            table_VD: The table.
            ids_T: Ids.
            dtype: Of activations, for a quantised table.
        """
        ...

    def norm(self, x: jax.Array, weight: jax.Array | None, eps: float, offset: float) -> jax.Array:
        """Root-mean-square norm over features, in float32; see `basic.rms_norm`.

        Args:
            x: Activations, of heads or not.
            weight: [D]; None for ones.
            eps: Added to the mean square.
            offset: Added to the weight.
        """
        ...

    def rope_tables(
        self, positions: jax.Array, timescales: Callable[[], jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Sines and cosines of rotary angles, for `rotate`.

        Args:
            positions: [T] int32.
            timescales: Makes them, [head_dim // 2] float32, see `rope.rope_timescales`.
        """
        ...

    def rotate(
        self,
        x: jax.Array,
        norm: tuple[jax.Array, float, float] | None,
        sin: jax.Array,
        cos: jax.Array,
    ) -> jax.Array:
        """Rotary embedding of heads, see `rope.apply_rope`.

        Args:
            x: [T, N, H].
            norm: Weight, eps and offset of the norm of each head before; None without.
            sin: From `rope_tables`.
            cos: From `rope_tables`.
        """
        ...

    def ragged_linear(self, weights: Weight, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """`x[t] @ W[e]` for each token t of each expert e, on one device.

        Args:
            weights: [E, in, out], or panels.
            x: [T, in]: first the tokens of expert 0, then those of expert 1, and so on.
            group_sizes: [E] int32, tokens of each expert; together at most T.

        Returns:
            [T, out]; undefined for tokens beyond the last expert's.
        """
        ...

    def heads_linear(self, weights: Weight, x: jax.Array) -> jax.Array:
        """`x[t, n] @ W[n]` for each head n: [T, N, in] to [T, N, out].

        Args:
            weights: [N, in, out], or panels.
            x: [T, N, in].
        """
        ...

    def steps_in_slots(self, states: jax.Array) -> bool:
        """Whether decode changes states where they are, in the slots of a pool."""
        ...


@dataclasses.dataclass(frozen=True)
class XlaKernels:
    """XLA's code: all platforms and dtypes. `fused` is for GPUs, `heads` for TPUs.

    `has_ragged_dot`: XLA's product of tokens with their experts reads each used weight once, as on
    TPUs; elsewhere it would multiply all tokens with all experts.
    """

    mesh: jax.sharding.AbstractMesh | None = None
    fused: FusedProducts | None = None
    heads: TpuHeads | None = None
    has_ragged_dot: bool = False

    @property
    def is_batch_invariant(self) -> bool:
        return False

    def activation_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        return dtype

    def weights(self, params: Mapping[str, jax.Array]) -> Mapping[str, Weight]:
        return {
            name: Int8Weight(x, params[name + SCALE_SUFFIX]) if name + SCALE_SUFFIX in params else x
            for name, x in params.items()
        }

    def fuse(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def linear(self, weight: Weight, x: jax.Array) -> jax.Array:
        if isinstance(weight, Int8Weight):
            return int8_linear(x, weight)
        assert isinstance(weight, jax.Array)
        return linear(x, weight)

    def unembed(self, table_VD: Weight, hidden_TD: jax.Array) -> jax.Array:
        dtype = None if self.fused is None else jnp.float32
        if isinstance(table_VD, Int8Weight):
            return int8_unembed(hidden_TD, table_VD, dtype)
        assert isinstance(table_VD, jax.Array)
        return unembed(hidden_TD, table_VD, dtype)

    def embed(self, table_VD: Weight, ids_T: jax.Array, dtype: jnp.dtype) -> jax.Array:
        if isinstance(table_VD, Int8Weight):
            return int8_embed(table_VD, ids_T, dtype)
        assert isinstance(table_VD, jax.Array)
        return embed(table_VD, ids_T)

    def norm(self, x: jax.Array, weight: jax.Array | None, eps: float, offset: float) -> jax.Array:
        return rms_norm(x, weight, eps, offset)

    def rope_tables(
        self, positions: jax.Array, timescales: Callable[[], jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        return rope_tables(positions, timescales())

    def rotate(
        self,
        x: jax.Array,
        norm: tuple[jax.Array, float, float] | None,
        sin: jax.Array,
        cos: jax.Array,
    ) -> jax.Array:
        if self.heads is not None and self.heads.serves(x):
            return self.heads.rotate(x, norm, sin, cos)
        x = x if norm is None else self.norm(x, *norm)
        return apply_rope(x, sin, cos)

    def ragged_linear(self, weights: Weight, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
        assert isinstance(weights, jax.Array)
        if self.fused is not None and self.fused.serves_experts(weights, x):
            return self.fused.ragged_linear(weights, x, group_sizes)
        if self.has_ragged_dot:
            return lax.ragged_dot(x, weights, group_sizes)
        return linear_in_blocks(weights, x, group_sizes)

    def heads_linear(self, weights: Weight, x: jax.Array) -> jax.Array:
        assert isinstance(weights, jax.Array)
        return lax.dot_general(x, weights, (((2,), (1,)), ((1,), (0,)))).swapaxes(0, 1)

    def steps_in_slots(self, states: jax.Array) -> bool:
        return self.heads is not None and self.heads.serves_states(states)

    def delta_step(
        self,
        states: jax.Array,
        heads: Heads,
        decay: jax.Array,
        rate: jax.Array,
        slots: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """The delta rule for one token of each row, see `delta_net.token_step`.

        Args:
            states: Those of the rows; with `slots` the pool that they are in.
            heads: Of the tokens.
            decay: [B, V]; -inf for states that begin with the token.
            rate: [B, V].
            slots: [B] int32, beyond the pool for rows that are to be skipped. Only where
                `steps_in_slots` is true.
        """
        if slots is None:
            return delta_net.token_step(states, heads, decay, rate)
        assert self.heads is not None
        return self.heads.delta_step(states, heads, decay, rate, slots)


@dataclasses.dataclass(frozen=True)
class CpuKernels:
    """The JIT-compiled CPU kernels: one CPU, panels. All are batch-invariant.

    `partial_outputs` are those of the weights whose last panel is partly filled, by name.
    """

    partial_outputs: tuple[tuple[str, int], ...] = ()

    @property
    def mesh(self) -> None:
        return None

    @property
    def fused(self) -> None:
        return None

    @property
    def is_batch_invariant(self) -> bool:
        return True

    def activation_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        del dtype
        return jnp.dtype("float32")

    def weights(self, params: Mapping[str, jax.Array]) -> Mapping[str, Weight]:
        outputs = dict(self.partial_outputs)

        def in_panels(name: str, x: jax.Array) -> sgljax_cpu.Panels:
            count = outputs.get(name, x.shape[-3] * sgljax_cpu.PANEL)
            return sgljax_cpu.Panels(x, count, params.get(name + SCALE_SUFFIX))

        return {name: in_panels(name, x) if x.ndim > 2 else x for name, x in params.items()}

    def fuse(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return sgljax_cpu.fuse(function)

    def linear(self, weight: Weight, x: jax.Array) -> jax.Array:
        assert isinstance(weight, sgljax_cpu.Panels)
        return sgljax_cpu.linear(weight.array, x, weight.num_outputs, weight.scale)

    def unembed(self, table_VD: Weight, hidden_TD: jax.Array) -> jax.Array:
        assert isinstance(table_VD, sgljax_cpu.Panels)
        return sgljax_cpu.linear(table_VD.array, hidden_TD, table_VD.num_outputs, table_VD.scale)

    def embed(self, table_VD: Weight, ids_T: jax.Array, dtype: jnp.dtype) -> jax.Array:
        del dtype
        if isinstance(table_VD, sgljax_cpu.Panels):
            return sgljax_cpu.embed(table_VD.array, ids_T, table_VD.scale)
        assert isinstance(table_VD, jax.Array)
        return embed(table_VD, ids_T).astype(jnp.float32)

    def norm(self, x: jax.Array, weight: jax.Array | None, eps: float, offset: float) -> jax.Array:
        weight = None if weight is None else weight.astype(jnp.float32)
        return sgljax_cpu.rms_norm(x, weight, eps, offset)

    def rope_tables(
        self, positions: jax.Array, timescales: Callable[[], jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        return sgljax_cpu.rope_tables(positions, constant_timescales(timescales))

    def rotate(
        self,
        x: jax.Array,
        norm: tuple[jax.Array, float, float] | None,
        sin: jax.Array,
        cos: jax.Array,
    ) -> jax.Array:
        return sgljax_cpu.rotate(x if norm is None else self.norm(x, *norm), sin, cos)

    def ragged_linear(self, weights: Weight, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
        assert isinstance(weights, sgljax_cpu.Panels)
        return sgljax_cpu.ragged_linear(weights.array, x, group_sizes, weights.num_outputs)

    def heads_linear(self, weights: Weight, x: jax.Array) -> jax.Array:
        num_tokens, num_heads, _ = x.shape
        group_sizes = jnp.full(num_heads, num_tokens, jnp.int32)
        rows = x.swapaxes(0, 1).reshape(num_heads * num_tokens, -1)
        out = self.ragged_linear(weights, rows, group_sizes)
        return out.reshape(num_heads, num_tokens, -1).swapaxes(0, 1)

    def steps_in_slots(self, states: jax.Array) -> bool:
        del states
        return True

    def net_heads(
        self, window: jax.Array, weight_CW: jax.Array, sizes: tuple[int, int, int]
    ) -> jax.Array:
        """Heads [N, T, C] of a window [N, W - 1 + T, C], as `split_heads` splits them."""
        num_heads, key_dim, _ = sizes
        return sgljax_cpu.net_heads(window, weight_CW.T, num_heads, key_dim, delta_net.EPS)

    def delta_rule(
        self, states: jax.Array, tokens: TokenTerms, sizes: tuple[int, int, int]
    ) -> tuple[jax.Array, jax.Array]:
        """The delta rule token by token, so that a token's bits depend on no cut.

        Shape: states: [S, V, h, d] -> the same, and [T, V, d], 0 for what is no token.
        """
        is_first = tokens.is_first.astype(jnp.int32)
        return sgljax_cpu.delta_rule(states, *tokens._replace(is_first=is_first), sizes[0])


class LinearBackend(NamedTuple):
    """The chosen backend, and why "auto" did not pick "native" on a CPU."""

    name: str
    kernels: Kernels
    why_not_native: str | None = None


def pick_kernels(name: str, target: Target) -> LinearBackend:
    """The backend of that name; "auto" picks "native", or "pallas" on one Hopper GPU."""
    problem = target.cpu_kernels_problem()
    if name == "native":
        require_backend(problem, "linear_backend 'native'")
    if problem is None and target.packs_weights:
        return LinearBackend("native", CpuKernels())
    if name == "pallas" or (name == "auto" and target.platform == "gpu"):
        from sgljax_engine.layers.fused import HOPPER, FusedProducts, fused_problem

        fused = fused_problem(target)
        if name == "pallas":
            require_backend(fused, "linear_backend 'pallas'")
        if name == "pallas" or (fused is None and target.compute_capability == HOPPER):
            return LinearBackend("pallas", XlaKernels(fused=FusedProducts()))
    is_cpu = name == "auto" and target.platform == "cpu"
    mesh = target.mesh if target.num_tensor_shards > 1 else None
    kernels = XlaKernels(mesh, has_ragged_dot=target.platform == "tpu")
    if name == "auto" and target.platform == "tpu":
        from sgljax_engine.layers.tpu import TpuHeads

        kernels = dataclasses.replace(kernels, heads=TpuHeads(mesh))
    return LinearBackend("xla", kernels, problem if is_cpu else None)
