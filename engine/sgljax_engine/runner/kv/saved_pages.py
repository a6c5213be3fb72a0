"""Contents of KV pages on the host."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from sgljax_engine.cache.kv_pages import KVPages, LayerKV, PageLayout
from sgljax_engine.runner.kv.host_arrays import from_numpy, num_bytes, to_numpy

_CHUNK_BYTES = 64 << 20
"""Pages move in chunks of about this size, which the device needs in addition to the pages."""


class SavedPages(NamedTuple):
    """Pages copied out of the cache.

    Attributes:
        chunks: The page ids of each chunk, int32 [N], and the `HostArray`s of a `KVPages` of N
            pages. Ids beyond the pool are padding.
    """

    chunks: list[tuple[np.ndarray, Any]]

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return sum(num_bytes(contents) for _, contents in self.chunks)

    def only(self, pages: Collection[int], num_pages: int) -> Iterator[tuple[np.ndarray, Any]]:
        """The chunks that hold any of these pages; other ids become padding."""
        kept = np.zeros(num_pages + 1, bool)
        kept[list(pages)] = True
        for ids, contents in self.chunks:
            wanted = np.where(kept[ids], ids, np.int32(num_pages))
            if (wanted < num_pages).any():
                yield wanted, contents

    def take(
        self, pages: Sequence[int], layouts: Sequence[PageLayout]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """The bits of k and v of some pages, by layer.

        Shape: [len(pages), num_kv_heads, page_size, head_dim] each, whatever the layout was.
        """
        places = {page: place for place, page in enumerate(pages)}
        layers: list[tuple[np.ndarray, np.ndarray]] = []
        for ids, contents in self.chunks:
            found = [(row, places[page]) for row, page in enumerate(ids.tolist()) if page in places]
            rows, targets = [row for row, _ in found], [target for _, target in found]
            for index, layer in enumerate(contents.layers):
                bits = tuple(layouts[index].unpack(to_numpy(part)) for part in layer)
                if index == len(layers):
                    shape = (len(pages), *bits[0].shape[1:])
                    layers.append((np.empty(shape, bits[0].dtype), np.empty(shape, bits[1].dtype)))
                for array, part in zip(layers[index], bits, strict=True):
                    array[targets] = part[rows]
        return layers


def page_chunks(
    pages: Sequence[int],
    rows: Sequence[int],
    layers: Sequence[tuple[np.ndarray, np.ndarray]],
    *,
    size: int,
    num_pages: int,
    layouts: Sequence[PageLayout],
    shardings: Sequence[jax.sharding.Sharding],
) -> Iterator[tuple[np.ndarray, Any]]:
    """Chunks as in `SavedPages` that put row `rows[i]` of each layer's bits into `pages[i]`."""
    for start, ids in enumerate(chunk_ids(pages, size, num_pages)):
        part = np.zeros(size, np.int64)
        wanted = rows[start * size : (start + 1) * size]
        part[: len(wanted)] = wanted
        contents: list[Any] = [
            [from_numpy(layout.pack(bits[part]), sharding) for bits in layer]
            for layer, layout, sharding in zip(layers, layouts, shardings, strict=True)
        ]
        yield ids, KVPages(tuple(LayerKV(*pair) for pair in contents))


def chunk_size(page_bytes: int, num_pages: int, chunk_bytes: int | None = None) -> int:
    """Number of pages in a chunk, a power of two; None for chunks of pages that move."""
    most = max(min((chunk_bytes or _CHUNK_BYTES) // page_bytes, num_pages), 1)
    return 1 << (most.bit_length() - 1)


def chunk_ids(pages: Sequence[int], size: int, num_pages: int) -> Iterator[np.ndarray]:
    """The page ids in chunks of one size, the last one padded with an id beyond the pool."""
    for start in range(0, len(pages), size):
        ids = np.full(size, num_pages, np.int32)
        part = pages[start : start + size]
        ids[: len(part)] = part
        yield ids
