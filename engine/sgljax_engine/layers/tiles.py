"""How tokens go through the layers of a forward pass: all together, or tile by tile.

The rounding of a matrix product depends on its number of rows: compilers and libraries pick other
kernels, blockings and fusions for 1, 16 and 300 tokens. In tiles of one width every token goes
through the same compiled loop body, in any program. Only the device knows the number of used tiles,
so a single tile is a loop too, and nothing in its body can be fused with code around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

In = TypeVar("In")
Out = TypeVar("Out")


class Tokens(Protocol):
    """A way to apply functions that treat each token alone."""

    @property
    def is_used(self) -> jax.Array | None:
        """[num_tokens] bool, tokens whose results are read; None if all may be."""
        ...

    def split(self, x: jax.Array) -> jax.Array:
        """Converts [T, ...] to the form that `map` takes."""
        ...

    def join(self, x: jax.Array) -> jax.Array:
        """The inverse of `split`."""
        ...

    def map(self, function: Callable[[In], Out], xs: In) -> Out:
        """Applies `function` to a tree of results of `split` or `map`."""
        ...


class Together(NamedTuple):
    """All tokens at once: least overhead, but rounding depends on their number.

    Attributes:
        is_used: See `Tokens`.
    """

    is_used: jax.Array | None = None

    def split(self, x: jax.Array) -> jax.Array:
        """The array itself."""
        return x

    def join(self, x: jax.Array) -> jax.Array:
        """The array itself."""
        return x

    def map(self, function: Callable[[In], Out], xs: In) -> Out:
        """Applies `function` once, to all tokens."""
        return function(xs)


class Tiles(NamedTuple):
    """Fixed-size tiles: rounding does not depend on the number of tokens or their place.

    Attributes:
        width: Tokens in a tile. Static.
        num_tokens: Tokens in the arrays. Static.
        num_used: Scalar int32, number of leading tokens in use. Tiles without any become 0.
        is_used: See `Tokens`.
    """

    width: int
    num_tokens: int
    num_used: jax.Array
    is_used: jax.Array | None = None

    def split(self, x: jax.Array) -> jax.Array:
        """[num_tokens, ...] to [tiles, width, ...]."""
        missing = self._num_tiles * self.width - self.num_tokens
        padded = jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1)))
        # Neither uses -1, since rows may be empty.
        return padded.reshape(self._num_tiles, self.width, *x.shape[1:])

    def join(self, x: jax.Array) -> jax.Array:
        """[tiles, width, ...] to [num_tokens, ...]."""
        return x.reshape(self._num_tiles * self.width, *x.shape[2:])[: self.num_tokens]

    def map(self, function: Callable[[In], Out], xs: In) -> Out:
        """Applies `function` to a tile at a time; leaves are [tiles, ...]."""

        def take(index: jax.Array) -> In:
            return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), xs)

        def put(all_tiles: jax.Array, tile: jax.Array, index: jax.Array) -> jax.Array:
            return lax.dynamic_update_index_in_dim(all_tiles, tile, index, 0)

        def body(index: jax.Array, out: Out) -> Out:
            tile = function(take(index))
            return jax.tree.map(lambda all_tiles, x: put(all_tiles, x, index), out, tile)

        shapes = jax.eval_shape(lambda: function(take(jnp.int32(0))))
        start = jax.tree.map(lambda x: jnp.zeros((self._num_tiles, *x.shape), x.dtype), shapes)
        num_used = (self.num_used + self.width - 1) // self.width
        return lax.fori_loop(0, num_used, body, start)

    @property
    def _num_tiles(self) -> int:
        # At least two: the only one would need no index, and its body would be another program.
        return max(2, -(-self.num_tokens // self.width))


def tokens_in_tiles(
    widths: Sequence[int],
    num_tokens: int,
    num_used: jax.Array,
    is_used: jax.Array | None = None,
) -> Together | Tiles:
    """Tiles of the narrowest width that holds all tokens, else the widest; `Together` if no widths.

    Args:
        widths: Tile widths, ascending.
        num_tokens: See `Tiles`.
        num_used: See `Tiles`.
        is_used: See `Tokens`.
    """
    if not widths:
        return Together(is_used)
    fitting = (width for width in widths if width >= num_tokens)
    return Tiles(next(fitting, widths[-1]), num_tokens, num_used, is_used)
