"""Contents of KV pages on the host."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from sgljax_engine.runner.kv.host_arrays import num_bytes

_CHUNK_BYTES = 64 << 20
"""Pages move in chunks of about this size, which the device needs in addition to the pages."""


class SavedPages(NamedTuple):
    """Pages copied out of the cache, by chunks.

    A chunk is page ids, int32 [N], of which those beyond the pool are padding, and the `HostArray`s
    of a `KVPages` of N pages.
    """

    chunks: list[tuple[np.ndarray, Any]]

    @property
    def nbytes(self) -> int:
        return sum(num_bytes(contents) for _, contents in self.chunks)

    def only(self, pages: Collection[int], num_pages: int) -> Iterator[tuple[np.ndarray, Any]]:
        """The chunks that hold any of these pages; other ids become padding."""
        kept = np.zeros(num_pages + 1, bool)
        kept[list(pages)] = True
        for ids, contents in self.chunks:
            wanted = np.where(kept[ids], ids, np.int32(num_pages))
            if (wanted < num_pages).any():
                yield wanted, contents


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
