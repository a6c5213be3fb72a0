"""Pages of sliding layers, kept only while a window may need their keys. Host-only; no JAX.

A model with sliding windows has two pools. A page of the first holds keys of the layers with full
attention; requests and the prefix cache count in these pages. Each of them has a *window page* in
the second pool while some query may see it: the same tokens' keys of the sliding layers. vLLM's
hybrid KV cache manager and SGLang's SWARadixCache have the same idea. Here tree and requests know
only pages of the first pool, and one array holds the pairs.

A window page is *held* by the running requests that see some of it. When nobody holds it, it is
freed if its page is a request's own. Else it stays *idle* with the cached page, for requests that
continue from there. When room is needed, the longest idle goes first. A cached prefix without the
window pages at its end cannot be continued: see `usable`.

Window page 0 belongs to nobody and stays zero. Attention reads it for pages that have left the
window. It gives their keys weight 0, but 0 times another request's leftovers may be NaN.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from sgljax_engine.cache.allocator import PageAllocator
from sgljax_engine.errors import EngineError

NONE = -1

NUM_NULL = 1
"""Window pages that belong to nobody: the first one. vLLM calls it the null block."""


class WindowSizes(NamedTuple):
    """Sizes of the second pool, in pages unless said.

    `num_pages` is without the null page. `per_request` are those that a running request needs
    beside the chunk that it prefills, `for_prefill` those of a dispatch's chunks. A query sees
    `num_tokens`.
    """

    num_pages: int
    num_tokens: int
    per_request: int
    for_prefill: int


class WindowPages:
    """The second pool; `by_page` is the window page of each page or `NONE`. Engine thread only."""

    def __init__(self, num_pages: int, sizes: WindowSizes, page_size: int) -> None:
        self.by_page = np.empty(num_pages, np.int32)
        self.sizes = sizes
        self._page_size = page_size
        self._allocator = PageAllocator(sizes.num_pages)
        self._num_holders = np.empty(num_pages, np.int32)
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.start_over()

    def start_over(self) -> None:
        self.by_page[:] = NONE
        self._num_holders[:] = 0
        self._idle.clear()
        self._allocator.start_over()

    @property
    def num_held(self) -> int:
        """Window pages that running requests need."""
        return self._allocator.num_used - len(self._idle)

    @property
    def num_idle(self) -> int:
        """Window pages of cached pages that no running request needs."""
        return len(self._idle)

    def first_needed(self, num_tokens: int) -> int:
        """Index of the first page with a key that the query after `num_tokens` tokens sees."""
        return max(num_tokens - self.sizes.num_tokens + 1, 0) // self._page_size

    def usable(self, pages: Sequence[int]) -> int:
        """The largest number of a prefix's first pages after which a request can continue."""
        counts = np.arange(1, len(pages) + 1)
        has_none = self.by_page[np.asarray(pages, np.int64)] == NONE
        runs = counts - np.maximum.accumulate(np.where(has_none, counts, 0))
        last = np.maximum(counts * self._page_size - self.sizes.num_tokens + 1, 0)
        is_enough = runs >= counts - last // self._page_size
        return int(counts[is_enough].max(initial=0))

    def is_usable(self, pages: Sequence[int], num_tokens: int) -> bool:
        """Whether a request can continue after tokens that end in the last of these pages."""
        needed = pages[self.first_needed(num_tokens) :]
        return all(self.by_page[page] != NONE for page in needed)

    def attach(self, page: int) -> None:
        """Holds the window page of a page; allocates one if it has none.

        Raises EngineError if all are held, which admission rules out: see `PagePool.window_room`.
        """
        if self.by_page[page] == NONE:
            if not self._allocator.num_free and self._idle:
                self._detach(next(iter(self._idle)))
            self.by_page[page] = NUM_NULL + self._allocator.allocate(1)[0]
            self._idle[page] = None
        self.hold(page)

    def hold(self, page: int) -> None:
        assert self.by_page[page] != NONE, page
        self._idle.pop(page, None)
        self._num_holders[page] += 1

    def let_go(self, pages: Iterable[int], *, keep: bool) -> None:
        """Ends one holding of window pages. Those that nobody holds then become idle or free."""
        for page in pages:
            self._num_holders[page] -= 1
            assert self._num_holders[page] >= 0, page
            if self._num_holders[page] == 0:
                self._idle[page] = None
                if not keep:
                    self._detach(page)

    def forget(self, pages: Iterable[int]) -> None:
        for page in pages:
            if self.by_page[page] != NONE:
                if self._num_holders[page]:
                    raise EngineError(f"KV page {page} is freed, but its window page is needed")
                self._detach(page)

    def _detach(self, page: int) -> None:
        del self._idle[page]
        self._allocator.free([int(self.by_page[page]) - NUM_NULL])
        self.by_page[page] = NONE

    def check_integrity(self, spans: Iterable[Sequence[int]]) -> None:
        """Raises EngineError unless pages and holders add up; a span is a holder's pages."""
        self._allocator.check_integrity()
        holders = np.zeros_like(self._num_holders)
        for pages in spans:
            np.add.at(holders, np.asarray(pages, np.int64), 1)
        if not np.array_equal(holders, self._num_holders):
            page = int(np.flatnonzero(holders != self._num_holders)[0])
            raise EngineError(
                f"{holders[page]} requests need the window page of {page}, "
                f"{self._num_holders[page]} are counted"
            )
        attached = np.flatnonzero(self.by_page != NONE)
        if sorted((self.by_page[attached] - NUM_NULL).tolist()) != self._allocator.used:
            raise EngineError("a window page is in use without a page, or by two")
        idle = {int(page) for page in attached if not holders[page]}
        if idle != set(self._idle) or (holders > 0).sum() != len(attached) - len(idle):
            raise EngineError("window pages are idle and needed at once, or neither")
