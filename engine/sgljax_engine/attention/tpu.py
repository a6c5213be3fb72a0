"""The attention backend "tpu": a Pallas kernel that also writes the cache. Imported on request."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from sgljax_engine.attention.base import AttentionOptions, BlockTables, NewTokens, in_blocks
from sgljax_engine.cache.kv_pages import LayerKV
from sgljax_engine.kernels.tpu.paged_attention import paged_attention
from sgljax_engine.kernels.tpu.paged_sizes import LANES, Scores
from sgljax_engine.kernels.tpu.shared_attention import shared_attention
from sgljax_engine.layers.target import Target, kv_axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuAttention:
    """The `Attention` of TPUs, by one kernel.

    Query heads are sharded over the axes of `mesh`, kv heads over those that `kv_axes` says.
    """

    name: str = "tpu"
    takes_projections: bool = False
    verifies_blocks: bool = True
    shares_prompts: bool = True

    heads_per_row: int = 1
    mesh: jax.sharding.AbstractMesh | None = None
    interpret: Any = False

    def attend(
        self,
        q_NQDh: jax.Array,
        layer: LayerKV,
        tables: BlockTables,
        options: AttentionOptions,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Pages have one head a row."""
        return self._call(q_NQDh, None, layer, tables, options, sinks)[0]

    def write_and_attend(
        self,
        new: NewTokens,
        layer: LayerKV,
        tables: BlockTables,
        slots: jax.Array,
        options: AttentionOptions,
    ) -> tuple[jax.Array, LayerKV]:
        """The kernel finds the slots by itself."""
        del slots
        assert new.v is not None, "latents"
        assert layer.v is not None, "latents"
        q, k, v = (in_blocks(x, tables) for x in (new.q, new.k, new.v))
        made = k.astype(layer.k.dtype), v.astype(layer.v.dtype)
        out, layer = self._call(q, made, layer, tables, options, new.sinks)
        return out.reshape(new.q.shape), layer

    def _call(
        self,
        q: jax.Array,
        new: tuple[jax.Array, jax.Array] | None,
        layer: LayerKV,
        tables: BlockTables,
        options: AttentionOptions,
        sinks: jax.Array | None,
    ) -> tuple[jax.Array, LayerKV]:
        def call(
            q: Any, new: Any, k: Any, v: Any, sinks: Any, tables: BlockTables
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            packing = _Packing.of(q, k, new)
            if packing is not None:
                q, new, k, v = packing.pack(q, new, k, v)
                sinks = None if sinks is None else packing.pad_heads(sinks)
            scores, before = Scores(*options), None
            table, positions, kv_lens, runs = tables
            if runs is not None and options.sliding_window is None:  # a window moves on
                before = shared_attention(
                    *(q, k, v, table, kv_lens, runs, scores, sinks), interpret=self.interpret
                )
                sinks = None
            out, k, v, _ = paged_attention(
                *(q, new, k, v, table, positions[:, 0], kv_lens, scores, sinks),
                before=before,
                interpret=self.interpret,
            )
            return (out if packing is None else packing.unpack(out)), k, v

        run: Callable[..., Any] = call
        if self.mesh is not None:
            num_kv_heads = layer.k.shape[1] if new is None else new[0].shape[2]
            axes = kv_axes(self.mesh.shape, num_kv_heads)
            heads, pages = P(None, None, self.mesh.axis_names), P(None, axes)
            fresh = None if new is None else (P(None, None, axes),) * 2
            of_heads = None if sinks is None else P(self.mesh.axis_names)
            run = jax.shard_map(
                call,
                mesh=self.mesh,
                in_specs=(heads, fresh, pages, pages, of_heads, P()),
                out_specs=(heads, pages, pages),
                check_vma=False,
            )
        out, k, v = run(q, new, layer.k, layer.v, sinks, tables)
        return out, LayerKV(k, v)


def heads_per_row(head_dim: int) -> int:
    """Kv heads in a row of a page: as many as fill the lanes."""
    return max(LANES // head_dim, 1)


class _Packing(NamedTuple):
    """Attention of heads that share rows, as attention of wider ones.

    A row of n kv heads is one kv head of n times the head_dim. The queries of each lie in its part
    of the row and are zero elsewhere, so their products with the others' keys are zero; of the
    output only that part counts. The matrix unit is as wide as a row, so this costs it nothing that
    small heads would not. The last of `num_rows` rows may lack heads; `group` is the queries of a
    kv head.
    """

    per_row: int
    num_rows: int
    num_kv_heads: int
    group: int
    head_dim: int

    @classmethod
    def of(cls, q: Any, k: Any, new: Any) -> _Packing | None:
        """The packing of one device's queries, pages and new keys; None if a head fills a row."""
        *_, num_heads, head_dim = q.shape
        per_row = heads_per_row(head_dim)
        if per_row == 1:
            return None
        num_kv_heads = k.shape[1] if new is None else new[0].shape[2]
        num_rows = -(-num_kv_heads // per_row)
        return cls(per_row, num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)

    def pack(self, q: Any, new: Any, k: Any, v: Any) -> tuple[Any, Any, Any, Any]:
        """Arguments of the kernel. Pages that it writes are packed already."""
        if new is None:
            k, v = (pack_heads(x, self.per_row) for x in (k, v))
        else:
            more = ((0, 0), (0, 0), (0, self._num_missing), (0, 0))
            rows = (*new[0].shape[:2], self.num_rows, self.per_row * self.head_dim)
            new = tuple(jnp.pad(x, more).reshape(rows) for x in new)
        heads = jnp.pad(q, ((0, 0), (0, 0), (0, self._num_missing * self.group), (0, 0)))
        zero = jnp.zeros((), q.dtype)
        places = self._places[:, None]
        parts = [jnp.where(places == place, heads, zero) for place in range(self.per_row)]
        return jnp.concatenate(parts, axis=-1), new, k, v

    def pad_heads(self, x: Any) -> Any:
        """Values of query heads [D], with zeros for missing ones."""
        return jnp.pad(x, (0, self._num_missing * self.group))

    def unpack(self, out: Any) -> Any:
        first, *others = jnp.split(out, self.per_row, axis=-1)
        for place, part in enumerate(others, start=1):
            first = jnp.where((self._places == place)[:, None], part, first)
        return first[:, :, : self.num_kv_heads * self.group]

    @property
    def _places(self) -> jax.Array:
        """The part of its row that each query head has, those of missing heads included."""
        num_heads = self.num_rows * self.per_row * self.group
        return jnp.arange(num_heads) // self.group % self.per_row

    @property
    def _num_missing(self) -> int:
        return self.num_rows * self.per_row - self.num_kv_heads


def pack_heads(pages: jax.Array, heads_per_row: int) -> jax.Array:
    """Packs the heads of one device; see `PageLayout`.

    Shape: [N, K, page_size, head_dim] -> [N, ceil(K / n), page_size, n * head_dim].
    """
    count, heads, size, dim = pages.shape
    num_rows = -(-heads // heads_per_row)
    more = num_rows * heads_per_row - heads
    padded = jnp.pad(pages, ((0, 0), (0, more), (0, 0), (0, 0)))
    rows = padded.reshape(count, num_rows, heads_per_row, size, dim).swapaxes(2, 3)
    return rows.reshape(count, num_rows, size, heads_per_row * dim)


def tpu_problem(target: Target, head_dims: Sequence[int]) -> str | None:
    if target.platform != "tpu":
        return f"it is for TPUs, the engine's devices are of kind {target.platform!r}"
    for head_dim in head_dims:
        if head_dim % LANES and LANES % head_dim:
            return f"it needs a head_dim that is a multiple or a divisor of {LANES}, got {head_dim}"
    if len(set(map(heads_per_row, head_dims))) > 1:
        return f"it needs layers whose heads fill equal parts of {LANES} lanes, got {head_dims}"
    return None


def tpu_attention(
    target: Target, head_dims: Sequence[int], *, interpret: Any = False
) -> TpuAttention:
    """Attention on TPUs for layers whose heads fill equal parts of the lanes."""
    mesh = target.mesh if target.num_tensor_shards > 1 else None
    return TpuAttention(heads_per_row=heads_per_row(head_dims[0]), mesh=mesh, interpret=interpret)
