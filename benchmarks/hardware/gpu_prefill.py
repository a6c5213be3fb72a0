"""Prefill attention with whole tiles of queries and without, on one GPU; see gpu_ladder.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.hardware.gpu_kernels import (
    Attend,
    KernelSizes,
    make_pages,
    measure_ceilings,
    measure_prefill,
)
from sgljax_engine.attention.base import AttentionOptions, BlockTables
from sgljax_engine.cache.kv_pages import LayerKV
from sgljax_engine.kernels.gpu.paged_attention import Scores, paged_attention
from sgljax_engine.kernels.gpu.prefill_attention import choose_prefill_tiling, prefill_attention

_BLOCK = 16
_TOLERANCE = 0.03
"""The largest difference of outputs in bfloat16, averages of standard normal values."""

_STEPS = {"tiles": None, "tiles, 64 keys a step": 64, "tiles, 32 keys a step": 32}
"""Keys in a step of the kernel with tiles; None for its own choice."""


def measure_prefill_kernels(*, is_smoke: bool) -> Iterator[tuple[str, float]]:
    """Microseconds of each kernel and its share of the matrix rate; NaN for one that is wrong.

    2,048 tokens of one request are attended to 2,048 keys, and to 8,192.
    """
    sizes = KernelSizes(blocks=(_BLOCK,), contexts=(2048, 8192))
    if is_smoke:
        sizes = KernelSizes.smoke()
    ceilings = measure_ceilings(sizes)
    without = _backend(paged_attention, None, interpret=is_smoke)
    backends = {"without tiles": without}
    for name, keys in _STEPS.items():
        backends[name] = _backend(prefill_attention, keys, interpret=is_smoke)
    expected = _sample(without, sizes)
    for name, backend in backends.items():
        error = float(np.max(np.abs(_sample(backend, sizes) - expected)))
        if not error <= _TOLERANCE:
            yield f"attention {name}, wrong by {error:.3g}", float("nan")
            continue
        for result in measure_prefill({name: backend}, sizes, ceilings):
            label = f"attention {name}, {result.context} keys"
            yield f"{label}, us", 1e6 * result.time_s
            yield f"{label}, % of the matrix rate", 100 * result.fraction


def _backend(kernel: Any, keys: int | None, *, interpret: bool) -> Attend:
    """A kernel with that many keys in a step."""

    def attend(
        q_NQDh: jax.Array, layer: LayerKV, tables: BlockTables, options: AttentionOptions
    ) -> jax.Array:
        more = {}
        if keys is not None:
            tiling = choose_prefill_tiling(q_NQDh.shape, layer.k.shape[1])
            more = {"tiling": tiling._replace(keys=keys)}
        return kernel(q_NQDh, *layer, *tables, Scores(*options), interpret=interpret, **more)

    return attend


def _sample(backend: Attend, sizes: KernelSizes) -> np.ndarray:
    """Outputs of a few blocks of two requests, one behind earlier keys."""
    ends = np.array([(at + 1) * _BLOCK for at in (*range(9), *range(5, 8))], np.int32)
    q_shape = (len(ends), _BLOCK, sizes.num_heads, sizes.head_dim)
    num_pages = -(-int(ends.max()) // sizes.page_size)
    table = np.arange(2 * num_pages, dtype=np.int32).reshape(2, num_pages)
    tables = BlockTables(
        jnp.asarray(np.repeat(table, (9, 3), axis=0)),
        jnp.asarray(ends[:, None] - _BLOCK + np.arange(_BLOCK, dtype=np.int32)),
        jnp.asarray(ends),
    )
    q = jax.random.normal(jax.random.key(3), q_shape, jnp.bfloat16)
    layer = make_pages(sizes, 2 * num_pages * sizes.page_size)
    attend = jax.jit(backend, static_argnums=3)
    return np.asarray(attend(q, layer, tables, AttentionOptions(sizes.head_dim**-0.5)), np.float32)
