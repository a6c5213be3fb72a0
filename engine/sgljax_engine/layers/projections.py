"""Products of activations with weights: one class per backend, and the choice among them."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

import jax
from jax import lax

from sgljax_engine.kernels.cpu.linear import linear as cpu_linear
from sgljax_engine.kernels.cpu.ragged_linear import ragged_linear as cpu_ragged_linear
from sgljax_engine.layers.basic import SMALL_BATCH, Layout, linear, small_batch_linear, unembed
from sgljax_engine.layers.ragged import linear_in_blocks
from sgljax_engine.layers.target import Target, require_backend


class Projections(Protocol):
    """Products of a backend. Hashable: programs are compiled for it."""

    @property
    def mesh(self) -> jax.sharding.AbstractMesh | None:
        """Axes over which weights are sharded; None on a single device."""
        ...

    def linear(
        self, weight: jax.Array, x: jax.Array, layout: Layout, *, is_batch_invariant: bool
    ) -> jax.Array:
        """`x @ W` over features.

        Args:
            weight: [out, in] features first, else [in, out].
            x: [in, T] features first, else [T, in].
            layout: Layout of inputs and result.
            is_batch_invariant: Give a token the same bits whatever T is.
        """
        ...

    def unembed(
        self, table_VD: jax.Array, hidden_TD: jax.Array, *, is_batch_invariant: bool
    ) -> jax.Array:
        """Logits [T, V] float32."""
        ...

    def ragged_linear(
        self,
        weights: jax.Array,
        x: jax.Array,
        group_sizes: jax.Array,
        layout: Layout,
        *,
        is_batch_invariant: bool,
    ) -> jax.Array:
        """`x[t] @ W[e]` for each token t of each expert e, on one device.

        Args:
            weights: [E, out, in] features first, else [E, in, out].
            x: [T, in]: first the tokens of expert 0, then those of expert 1, and so on.
            group_sizes: [E] int32, tokens of each expert; together at most T.
            layout: Layout of the weights.
            is_batch_invariant: Give a token the same bits whichever others its expert has.

        Returns:
            [T, out]; undefined for tokens beyond the last expert's.
        """
        ...


@dataclasses.dataclass(frozen=True)
class XlaProjections:
    """XLA's products: all platforms and dtypes.

    Attributes:
        mesh: See `Projections`.
    """

    mesh: jax.sharding.AbstractMesh | None = None

    def linear(
        self, weight: jax.Array, x: jax.Array, layout: Layout, *, is_batch_invariant: bool
    ) -> jax.Array:
        """See `Projections`."""
        is_narrow = is_batch_invariant and x.shape[layout.token_axis] < SMALL_BATCH
        return (small_batch_linear if is_narrow else linear)(x, weight, layout)

    def unembed(
        self, table_VD: jax.Array, hidden_TD: jax.Array, *, is_batch_invariant: bool
    ) -> jax.Array:
        """See `Projections`. The order of its sums does not depend on the tokens."""
        del is_batch_invariant
        return unembed(hidden_TD, table_VD)

    def ragged_linear(
        self,
        weights: jax.Array,
        x: jax.Array,
        group_sizes: jax.Array,
        layout: Layout,
        *,
        is_batch_invariant: bool,
    ) -> jax.Array:
        """See `Projections`.

        For TPUs XLA has a kernel that reads each used weight once. For CPUs it would multiply all
        tokens with all experts. Nothing promises the order of sums of either.
        """
        if is_batch_invariant or layout is Layout.FEATURES_FIRST:
            return linear_in_blocks(
                weights, x, group_sizes, layout, is_batch_invariant=is_batch_invariant
            )
        return lax.ragged_dot(x, weights, group_sizes)


@dataclasses.dataclass(frozen=True)
class CpuProjections:
    """The JIT-compiled CPU kernels: one CPU, float32, features first."""

    @property
    def mesh(self) -> None:
        """See `Projections`."""
        return None

    def linear(
        self, weight: jax.Array, x: jax.Array, layout: Layout, *, is_batch_invariant: bool
    ) -> jax.Array:
        """See `Projections`."""
        assert layout is Layout.FEATURES_FIRST, layout
        return cpu_linear(weight, x, is_deterministic=is_batch_invariant)

    def unembed(
        self, table_VD: jax.Array, hidden_TD: jax.Array, *, is_batch_invariant: bool
    ) -> jax.Array:
        """See `Projections`. Hidden states were transposed just before: XLA drops both."""
        return cpu_linear(
            table_VD, hidden_TD.T, is_token_major=True, is_deterministic=is_batch_invariant
        )

    def ragged_linear(
        self,
        weights: jax.Array,
        x: jax.Array,
        group_sizes: jax.Array,
        layout: Layout,
        *,
        is_batch_invariant: bool,
    ) -> jax.Array:
        """See `Projections`. The kernel is batch-invariant."""
        del is_batch_invariant
        assert layout is Layout.FEATURES_FIRST, layout
        return cpu_ragged_linear(weights, x, group_sizes)


class LinearBackend(NamedTuple):
    """The chosen backend.

    Attributes:
        name: "native" or "xla".
        projections: Products of the backend.
        why_not_native: Why "auto" did not pick "native" on a CPU; None elsewhere.
    """

    name: str
    projections: Projections
    why_not_native: str | None = None


def pick_projections(name: str, target: Target) -> LinearBackend:
    """The backend of that name; "auto" picks "native" where it is available.

    Args:
        name: One of `config.LINEAR_BACKENDS`.
        target: What the engine runs on.

    Raises:
        InvalidConfigError: when "native" is asked for but not available.
    """
    problem = target.cpu_kernels_problem()
    if name == "native":
        require_backend(problem, "linear_backend 'native'")
    if name != "xla" and problem is None:
        return LinearBackend("native", CpuProjections())
    is_cpu = name == "auto" and target.platform == "cpu"
    mesh = target.mesh if target.num_tensor_shards > 1 else None
    return LinearBackend("xla", XlaProjections(mesh), problem if is_cpu else None)
