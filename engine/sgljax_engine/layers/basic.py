"""Projection, embedding, normalisation.

Shape legend of the suffixes: T tokens, D model dim, N heads, H head dim.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

_T = TypeVar("_T")

SMALL_BATCH = 64
"""`small_batch_linear` serves fewer tokens than this."""


_SUMMANDS = 16

_PART_SIZE = 1 << 16
"""Weights in a part of a matrix-vector product. XLA gives parts of half this size to one thread."""

_MAX_PARTS = 8


class Layout(enum.Enum):
    """Memory layout of activations and projection weights; the backend decides it.

    `TOKENS_FIRST`, which suits TPU and GPU matrix units: activations [T, D] and [T, N, H], weights
    [in, out]. `FEATURES_FIRST`: activations [D, T] and [N, H, T], weights [out, in]. On CPUs XLA's
    products `W @ x` take up to a fifth less time for decode-sized batches, and norms and gates
    process whole vectors of tokens. `PANELS`, of the JIT-compiled CPU kernels: activations as in
    `TOKENS_FIRST`, weights as in `sgljax_cpu.panels`.
    """

    TOKENS_FIRST = "tokens_first"
    FEATURES_FIRST = "features_first"
    PANELS = "panels"

    @property
    def is_tokens_first(self) -> bool:
        """Whether activations are [T, D]."""
        return self is not Layout.FEATURES_FIRST

    @property
    def feature_axis(self) -> int:
        """The axis of features, or of a head's channels, in activations."""
        return -1 if self.is_tokens_first else -2

    @property
    def head_axis(self) -> int:
        """The axis of heads in activations of heads."""
        return 1 if self.is_tokens_first else 0

    @property
    def token_axis(self) -> int:
        """The axis of tokens in activations of features."""
        return 0 if self.is_tokens_first else -1

    def place(self, x: jax.Array) -> jax.Array:
        """Converts activations [T, ...] to this layout."""
        return x if self.is_tokens_first else jnp.moveaxis(x, 0, -1)

    def tokens_first(self, x: jax.Array) -> jax.Array:
        """The inverse of `place`."""
        return x if self.is_tokens_first else jnp.moveaxis(x, -1, 0)

    def materialize(self, x: jax.Array) -> jax.Array:
        """Materializes `x`, transposed between layouts, as the input of a product.

        On CPUs XLA would transpose it inside the product, which is much slower than before it.
        """
        return x if self.is_tokens_first else lax.optimization_barrier(x)

    def compute_once(self, make: Callable[[jax.Array], _T], x: jax.Array) -> _T:
        """Computes `make(x)`, a pytree of arrays, once and into memory. Integers in `x` are >= 0.

        XLA on CPUs would recompute cheap-looking values, such as sines, in each fusion that reads
        them. A loop returns its result in memory, so this is a loop of one iteration, which the
        compiler cannot know.
        """
        if self.is_tokens_first:
            return make(x)
        empty = jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), jax.eval_shape(make, x))
        num_turns = 1 + jnp.minimum(x.ravel()[0], 0)
        return lax.fori_loop(0, num_turns, lambda _, out: make(x), empty)

    def split_heads(self, x: jax.Array, head_dim: int) -> jax.Array:
        """Features [N * H] to [N, H]."""
        if self.is_tokens_first:
            return x.reshape(x.shape[0], -1, head_dim)
        return x.reshape(-1, head_dim, x.shape[-1])

    def per_feature(self, vector: jax.Array) -> jax.Array:
        """Reshapes a vector [D] or [H] to broadcast against activations."""
        return vector[None, :] if self.is_tokens_first else vector[:, None]


def default_layout(platform: str) -> Layout:
    """The layout for XLA's products on a JAX platform."""
    return Layout.FEATURES_FIRST if platform == "cpu" else Layout.TOKENS_FIRST


def linear(x: jax.Array, weight: jax.Array, layout: Layout) -> jax.Array:
    """`x @ W` over features, with activations and weight in the layout."""
    if layout is Layout.FEATURES_FIRST:
        if x.shape[-1] == 1:
            return _matrix_vector(weight, x)
        return lax.dot_general(weight, x, (((1,), (0,)), ((), ())))
    return lax.dot_general(x, weight, (((1,), (0,)), ((), ())))


def _matrix_vector(weight: jax.Array, x: jax.Array) -> jax.Array:
    """`W @ x` of a single token: [out, in] times [in, 1].

    Computed as a batch of products: XLA on CPUs spreads a batch over its threads, but runs a small
    matrix-vector product on one.
    """
    size = weight.shape[0]
    wanted = max(min(weight.size // _PART_SIZE, _MAX_PARTS), 1)
    num_parts = next(n for n in range(wanted, 0, -1) if size % n == 0)
    parts = weight.reshape(num_parts, size // num_parts, -1)
    copies = jnp.broadcast_to(x[:, 0], (num_parts, x.shape[0]))
    return lax.dot_general(parts, copies, (((2,), (1,)), ((0,), (0,)))).reshape(size, 1)


def small_batch_linear(x: jax.Array, weight: jax.Array, layout: Layout) -> jax.Array:
    """`linear` for a small batch, which on CPUs sums in the order of large batches.

    Features first, products of fewer than 64 tokens run in kernels that sum in another order.
    Tokens first they do not, but take more time: see `runner.compile.widths`.
    """
    if layout is Layout.TOKENS_FIRST:
        return linear(x, weight, layout)
    transposed = lax.optimization_barrier(x.T)
    return lax.optimization_barrier(lax.dot_general(transposed, weight, (((1,), (1,)), ((), ())))).T


def embed(table_VD: jax.Array, ids_T: jax.Array) -> jax.Array:
    """Rows of the embedding table. Ids must be in range (they are checked on the host)."""
    return jnp.take(table_VD, ids_T, axis=0, mode="clip")


def unembed(
    x_TD: jax.Array, table_VD: jax.Array, dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """Logits [T, V] float32 from a [V, D] table; products are rounded to `dtype`, or their own."""
    contract = (((1,), (1,)), ((), ()))
    found = lax.dot_general(x_TD, table_VD, contract, preferred_element_type=dtype)
    return found.astype(jnp.float32)


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """`cap * tanh(x / cap)`, which stays within (-cap, cap); `x` itself without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def rms_norm(
    x: jax.Array,
    weight: jax.Array | None,
    eps: float,
    offset: float = 0.0,
    axis: int = -1,
    *,
    is_ordered: bool = False,
) -> jax.Array:
    """Root-mean-square norm over one axis, in float32 (Zhang and Sennrich, 2019).

    Args:
        x: Any shape.
        weight: Broadcasts against the last axes of `x`; None for ones.
        eps: Added to the mean square.
        offset: Added to the weight; 1 for models that store their weights minus one (Gemma).
        axis: Axis to normalise over.
        is_ordered: Sum squares with `ordered_sum`.
    """
    x32 = x.astype(jnp.float32)
    add_up = ordered_sum if is_ordered else functools.partial(jnp.sum, keepdims=True)
    rms = jnp.sqrt(add_up(x32 * x32, axis=axis) / x.shape[axis] + eps)
    if weight is None:
        return (x32 / rms).astype(x.dtype)
    # All of one rank, for hosts that set jax_numpy_rank_promotion="raise".
    weight32 = weight.astype(jnp.float32).reshape((1,) * (x.ndim - weight.ndim) + weight.shape)
    if offset:
        weight32 = weight32 + offset
    return (weight32 * (x32 / rms)).astype(x.dtype)


def ordered_sum(x: jax.Array, axis: int) -> jax.Array:
    """The sum over an axis, kept with size 1, in an order that depends only on its size.

    Slices are added elementwise, up to `_SUMMANDS` of them one after another, and the partial sums
    likewise. The order of a reduction is the compiler's choice, and may depend on the other axes.
    """
    size = x.shape[axis]
    while size > 1:
        count = next((n for n in range(min(size, _SUMMANDS), 1, -1) if size % n == 0), size)
        size //= count
        parts = [lax.slice_in_dim(x, i * size, (i + 1) * size, axis=axis) for i in range(count)]
        x = functools.reduce(jnp.add, parts)
    return x
