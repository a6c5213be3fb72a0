"""Attention of one token per row on NVIDIA GPUs, from its projections on: one Pallas kernel.

Each program makes the queries and the key of its heads itself: their norms and the rotary
embedding, which take some hundred numbers. The new key and value never come back from memory: they
are where the softmax of the first split starts, and the program of that split writes them to their
page. What follows is the loop of `paged_attention`, over the keys before.

Shape legend: that of `attention.base`; B rows of one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from sgljax_engine.kernels.gpu.paged_attention import (
    MASKED,
    NUM_STAGES,
    Keys,
    Scores,
    SharedPart,
    Softmax,
    Tiling,
    attend_to_keys,
    choose_tiling,
    combine,
    first_own_step,
    log2_scores,
    log2_sinks,
    split_result,
    steps_of_split,
    with_shared,
)


class HeadNorms(NamedTuple):
    """RMS norms of each query and key head: weights [h], static `eps` and `offset`."""

    q: jax.Array
    k: jax.Array
    eps: float
    offset: float


class _Refs(NamedTuple):
    q: Any
    k: Any
    v: Any
    sin: Any
    cos: Any
    k_pages: Any
    v_pages: Any
    page_table: Any
    kv_lens: Any
    sinks: Any = None
    q_norm: Any = None
    k_norm: Any = None
    begins: Any = None
    peaks: Any = None
    totals: Any = None
    accs: Any = None

    @property
    def shared(self) -> SharedPart | None:
        parts = self.begins, self.peaks, self.totals, self.accs
        return None if self.begins is None else SharedPart(*parts)


def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    norms: HeadNorms | None,
    pages: tuple[jax.Array, jax.Array],
    page_table: jax.Array,
    kv_lens: jax.Array,
    options: Scores,
    sinks: jax.Array | None = None,
    *,
    shared: SharedPart | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Attends from projections, and writes the new keys and values to their pages in place.

    Shape: q: [B, num_heads, h], h one of `paged_attention.HEAD_DIMS`. k, v: [B, num_kv_heads, h].
    rope: sines and cosines [B, h // 2] float32. page_table: [B, P] int32. kv_lens: [B] int32, keys
    with these tokens, which are the last; 0 for an unused row, whose token is not written and whose
    output is 0. sinks: as of `paged_attention`. shared: made by `shared_attention` of these
    projections, without sinks. The output has the shape and dtype of q.
    """
    batch, num_heads, head_dim = q.shape
    k_pages = pages[0]
    shape = (batch, 1, num_heads, head_dim)
    tiling = choose_tiling(shape, k_pages, page_table.shape[1])
    is_split = tiling.splits > 1
    eps, offset = (0.0, 0.0) if norms is None else (norms.eps, norms.offset)

    def kernel(*refs: Any) -> None:
        given, results = _Refs(**dict(zip(args, refs[:-4], strict=True))), refs[-4:]
        _attend(given, results, tiling, options, eps, offset)

    given = _Refs(q, k, v, *rope, *pages, page_table, kv_lens, sinks)
    if norms is not None:
        given = given._replace(q_norm=norms.q, k_norm=norms.k)
    if shared is not None:
        given = given._replace(**shared._asdict())
    args = {name: each for name, each in given._asdict().items() if each is not None}
    out, lse, *new_pages = pl.pallas_call(
        kernel,
        grid=(batch, k_pages.shape[1] * tiling.row_tiles, tiling.splits),
        out_shape=(
            jax.ShapeDtypeStruct((tiling.splits, *shape), jnp.float32 if is_split else q.dtype),
            jax.ShapeDtypeStruct((tiling.splits, *shape[:3]), jnp.float32),
            *(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in pages),
        ),
        input_output_aliases={5: 2, 6: 3},
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps, num_stages=NUM_STAGES),
        interpret=interpret,
        name="decode_attention",
    )(*args.values())
    out = combine(out, lse).astype(q.dtype) if is_split else out[0]
    return out[:, 0], (new_pages[0], new_pages[1])


def _attend(
    refs: _Refs,
    results: Sequence[Any],
    tiling: Tiling,
    options: Scores,
    eps: float,
    offset: float,
) -> None:
    """The kernel: the query heads of a kv head of one row, over one split of its context.

    `results` are refs of out [splits, B, 1, num_heads, h], lse [splits, B, 1, num_heads] and the
    pages of K and V.
    """
    out_ref, lse_ref, k_out_ref, v_out_ref = results
    row, split = pl.program_id(0), pl.program_id(2)
    kv_head = lax.div(pl.program_id(1), tiling.row_tiles)
    tile = lax.rem(pl.program_id(1), tiling.row_tiles)
    num_heads, head_dim = refs.q.shape[1:]
    _, num_kv_heads, page_size, _ = refs.k_pages.shape
    group = num_heads // num_kv_heads

    member = tile * tiling.rows + jnp.arange(tiling.rows, dtype=jnp.int32)
    is_row, head = member < group, kv_head * group + member
    kv_len = refs.kv_lens[row]
    # A token's key is not in its page yet: only what comes before it is read from there.
    before = jnp.maximum(kv_len - 1, 0)
    dtype = refs.k_pages.dtype

    angles = (refs.sin, refs.cos)
    q = rotated_heads(refs.q, refs.q_norm, angles, row, head[:, None], is_row[:, None], eps, offset)
    k = rotated_heads(refs.k, refs.k_norm, angles, row, kv_head, None, eps, offset)
    q, k = q.astype(dtype), k.astype(dtype)
    dim = jnp.arange(head_dim, dtype=jnp.int32)
    v = plgpu.load(refs.v.at[row, kv_head, dim]).astype(dtype)

    own = log2_scores(
        jnp.sum(q.astype(jnp.float32) * k.astype(jnp.float32)[None, :], axis=1), options
    )
    is_own = jnp.full((tiling.rows,), (split == 0) & (kv_len > 0))
    start: Softmax = (
        jnp.where(is_own, own, MASKED),
        jnp.where(is_own, 1.0, 0.0),
        (jnp.where(is_own[:, None], v.astype(jnp.float32)[None, :], 0.0),),
    )
    if refs.sinks is not None:
        start = _with_sinks(start, log2_sinks(refs.sinks, head, is_row), is_own)
    zero = jnp.zeros_like(member)
    begin: jax.Array | int = 0
    if refs.shared is not None:
        begin = first_own_step(refs.shared, row, kv_len, tiling)
        start = with_shared(start, refs.shared, (row, zero, head), is_row, begin, split, tiling)
    position = jnp.full((tiling.rows,), before)
    steps = steps_of_split(before, before, split, tiling, options, begin)
    keys = Keys(refs.k_pages, refs.v_pages, refs.page_table, row, kv_head, before)
    softmax = attend_to_keys((q,), position, keys, steps, start, tiling, options)
    (out,), lse = split_result(softmax)
    at = out_ref.at[split, row, zero[:, None], head[:, None], dim[None, :]]
    plgpu.store(at, out.astype(out_ref.dtype), mask=is_row[:, None])
    plgpu.store(lse_ref.at[split, row, zero, head], lse, mask=is_row)

    page = refs.page_table[row, lax.div(before, page_size)]
    at_page = (page, kv_head, lax.rem(before, page_size), dim)
    writes = jnp.full((head_dim,), (split == 0) & (tile == 0) & (kv_len > 0))
    plgpu.store(k_out_ref.at[at_page], k, mask=writes)
    plgpu.store(v_out_ref.at[at_page], v, mask=writes)


def _with_sinks(start: Softmax, sinks: jax.Array, is_own: jax.Array) -> Softmax:
    """Adds a key without a value to the softmax of one key, where there is that."""
    peak, total, (acc,) = start
    new_peak = jnp.where(is_own, jnp.maximum(peak, sinks), peak)
    own = jnp.exp2(peak - new_peak)
    total = total * own + jnp.where(is_own, jnp.exp2(sinks - new_peak), 0.0)
    return new_peak, total, (acc * own[:, None],)


def rotated_heads(
    ref: Any,
    norm_ref: Any,
    angles: tuple[Any, Any],
    row: jax.Array,
    head: jax.Array,
    mask: jax.Array | None,
    eps: float,
    offset: float,
) -> jax.Array:
    """Heads [..., h] float32 of a row, normalised and rotated; inside a kernel.

    `ref` is [T, N, h], `angles` the refs of sines and cosines [T, h // 2]; `head` is [R, 1] or,
    without a mask, a scalar; `row` a scalar or as `head`. Each channel is read with its partner,
    which is half a head away.
    """
    head_dim = ref.shape[-1]
    dim = jnp.arange(head_dim, dtype=jnp.int32)
    partner = lax.rem(dim + head_dim // 2, head_dim)
    is_scalar = mask is None

    def load(channels: jax.Array) -> jax.Array:
        if is_scalar:
            return plgpu.load(ref.at[row, head, channels]).astype(jnp.float32)
        at = ref.at[row, head, channels[None, :]]
        return plgpu.load(at, mask=mask, other=0.0).astype(jnp.float32)

    def wide(values: jax.Array) -> jax.Array:
        return values if is_scalar or values.ndim == 2 else values[None, :]

    x, other = load(dim), load(partner)
    if norm_ref is not None:
        scale = 1.0 / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) / head_dim + eps)
        weight = plgpu.load(norm_ref.at[dim]).astype(jnp.float32) + offset
        weight_of_other = plgpu.load(norm_ref.at[partner]).astype(jnp.float32) + offset
        x, other = x * scale * wide(weight), other * scale * wide(weight_of_other)
    angle = lax.rem(dim, head_dim // 2)
    if jnp.ndim(row):
        angle, dim = angle[None, :], dim[None, :]
    sin, cos = (plgpu.load(each.at[row, angle]) for each in angles)
    sin = jnp.where(dim < head_dim // 2, -sin, sin)
    return x * wide(cos) + other * wide(sin)
