"""The device programs that move the contents of pages; see `runner.programs.prefill`."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from sgljax_engine.cache.kv_pages import KVPages
from sgljax_engine.cache.layer_states import LayerState, scatter_states
from sgljax_engine.runner.batches.page_ids import PageIds
from sgljax_engine.runner.programs.context import ProgramContext

BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
"""Unsigned integer dtypes by size in bytes."""


def copy_pages(
    kv: KVPages,
    sources: PageIds,
    targets: PageIds,
    num_groups: jax.Array,
    *,
    static: ProgramContext,
) -> KVPages:
    """Copies page `sources[g, i]` to `targets[g, i]`; targets beyond the pool are dropped.

    No page may be both source and target, so the order does not matter. Its time follows the number
    of groups, so one program serves any number of copies. `kv` is donated.

    Shape: sources, targets: [G, C] int32; num_groups: int32, number of groups that hold copies.
    """

    def copy_group(group: jax.Array, kv: KVPages) -> KVPages:
        def copy(pages: jax.Array, sources: jax.Array, targets: jax.Array) -> jax.Array:
            return pages.at[targets[group]].set(pages[sources[group]], mode="drop")

        return _each_layer(copy, kv, static, sources, targets)._replace(states=kv.states)

    return lax.fori_loop(0, num_groups, copy_group, kv)


def read_pages(kv: KVPages, page_ids: PageIds, *, static: ProgramContext) -> KVPages:
    """The contents of some pages, in the order of `page_ids`, int32 [N].

    They are returned as unsigned integers of the same bits, since numpy lacks some dtypes; of pages
    beyond the pool, something. Without recurrent states, which belong to no page. `kv` is not
    donated.
    """

    def read(pages: jax.Array, ids: jax.Array) -> jax.Array:
        contents = pages.at[jnp.minimum(ids, pages.shape[0] - 1)].get(mode="promise_in_bounds")
        return lax.bitcast_convert_type(contents, BITS[pages.dtype.itemsize])

    return _each_layer(read, kv, static, page_ids)


def write_pages(
    kv: KVPages, moved: KVPages, page_ids: PageIds, *, static: ProgramContext
) -> KVPages:
    """Writes the result of `read_pages` to pages; drops ids beyond the pool. `kv` is donated."""

    def write(pages: jax.Array, ids: jax.Array, bits: jax.Array) -> jax.Array:
        contents = lax.bitcast_convert_type(bits, pages.dtype)
        return pages.at[ids].set(contents, mode="drop")

    of_layers = zip(kv.layers, _ids_of_layers(static, page_ids), moved.layers, strict=True)
    layers = tuple(
        jax.tree.map(lambda pages, bits, ids=ids: write(pages, ids, bits), layer, bits)
        for layer, ids, bits in of_layers
    )
    routed = kv.routed
    if routed is not None and moved.routed is not None:
        routed = write(routed, page_ids.pages, moved.routed)
    return KVPages(layers, routed, kv.states)


def copy_states(
    kv: KVPages,
    sources: jax.Array,
    targets: jax.Array,
    count: jax.Array,
    *,
    static: ProgramContext,
) -> KVPages:
    """Copies the first `count` recurrent states from slots `sources` to slots `targets`.

    No slot may be both. `kv` is donated.

    Shape: sources, targets: [G] int32; count: int32
    """
    del static

    def copy(index: jax.Array, states: tuple[LayerState, ...]) -> tuple[LayerState, ...]:
        def one(x: jax.Array) -> jax.Array:
            found = lax.dynamic_index_in_dim(x, sources[index], keepdims=True)
            return lax.dynamic_update_slice_in_dim(x, found, targets[index], axis=0)

        return jax.tree.map(one, states)

    return kv._replace(states=lax.fori_loop(0, count, copy, kv.states))


def read_states(kv: KVPages, slots: jax.Array, *, static: ProgramContext) -> tuple[LayerState, ...]:
    """The recurrent states in some slots [N], of which those beyond the pool give something.

    `kv` is not donated.
    """
    del static
    return jax.tree.map(lambda x: jnp.take(x, slots, axis=0, mode="clip"), kv.states)


def write_states(
    kv: KVPages, states: tuple[LayerState, ...], slots: jax.Array, *, static: ProgramContext
) -> KVPages:
    """Writes states to slots [N]; drops those of slots beyond the pool. `kv` is donated."""
    del static
    return kv._replace(states=scatter_states(kv.states, states, slots))


def read_routed(kv: KVPages, pages: jax.Array, *, static: ProgramContext) -> jax.Array:
    """The experts of the tokens in some pages, of which those beyond the pool give something.

    `kv` is not donated.

    Shape: pages: [N] int32 -> [N, page_size, W], see `KVPages`
    """
    del static
    assert kv.routed is not None
    return jnp.take(kv.routed, pages, axis=0, mode="clip")


def _each_layer(
    function: Callable[..., jax.Array], kv: KVPages, static: ProgramContext, *ids: PageIds
) -> KVPages:
    """Applies a function to each layer's pages and its ids, and to the experts beside them."""
    of_layers = zip(*(_ids_of_layers(static, each) for each in ids), strict=True)
    layers = tuple(
        jax.tree.map(lambda pages, own=own: function(pages, *own), layer)
        for layer, own in zip(kv.layers, of_layers, strict=True)
    )
    if kv.routed is None:
        return KVPages(layers)
    return KVPages(layers, function(kv.routed, *(each.pages for each in ids)))


def _ids_of_layers(static: ProgramContext, ids: PageIds) -> list[jax.Array]:
    return [ids.window_pages if in_window else ids.pages for in_window in static.in_windows]
