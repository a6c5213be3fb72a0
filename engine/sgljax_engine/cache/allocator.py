"""Tracks which KV pages are free and which are in use. Host-only; no JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sgljax_engine.errors import EngineError


class PageAllocator:
    """Hands out page ids from a fixed pool. Not thread-safe: the engine thread owns it.

    Freed pages are reused last-in first-out, so that a small working set stays in cache.
    """

    def __init__(
        self, num_pages: int, on_free: Callable[[Sequence[int]], None] | None = None
    ) -> None:
        self.num_pages = num_pages
        self._on_free = on_free
        self.start_over()

    def start_over(self) -> None:
        """Frees every page, without calling `on_free`."""
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._is_used = bytearray(self.num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    @property
    def used(self) -> list[int]:
        return [page for page, is_used in enumerate(self._is_used) if is_used]

    def allocate(self, count: int) -> list[int]:
        """Allocates `count` pages, or raises EngineError and allocates none."""
        if count > len(self._free):
            raise EngineError(f"cannot allocate {count} KV pages, {len(self._free)} are free")
        if count == 0:
            return []
        pages = self._free[-count:][::-1]
        del self._free[-count:]
        for page in pages:
            self._is_used[page] = 1
        return pages

    def free(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):
            if not 0 <= page < self.num_pages or not self._is_used[page]:
                raise EngineError(f"KV page {page} freed but it is not in use")
            self._is_used[page] = 0
            self._free.append(page)
        if self._on_free is not None:
            self._on_free(pages)

    def check_integrity(self) -> None:
        if len(set(self._free)) != len(self._free):
            raise EngineError("a KV page is free twice")
        if sum(self._is_used) + len(self._free) != self.num_pages:
            raise EngineError(
                f"{sum(self._is_used)} used + {len(self._free)} free KV pages != {self.num_pages}"
            )
