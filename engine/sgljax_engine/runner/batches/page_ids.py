"""Host arrays that say which pages a program reads and writes, of one pool or of two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sgljax_engine.types import PageCopy, StateCopy

NO_SLOT = np.iinfo(np.int32).max
"""A slot, or page, beyond any pool: writes to it are dropped."""

_COPY_GROUP = 8
"""Pages that are copied together."""


class PageIds(NamedTuple):
    """Pages, and the window pages of the same tokens; None without.

    Shape: equal, any; int32. What a program is not to read or write is beyond its pool.
    """

    pages: Any
    window_pages: Any = None


def build_copies(
    copies: Sequence[PageCopy],
    *,
    max_copies: int,
    num_pages: int,
    windows: np.ndarray | None = None,
) -> tuple[PageIds, PageIds, np.int32]:
    """Sources and targets in groups, [G, C] each, and the number of used groups.

    There are groups for `max_copies` copies; padding writes beyond the pool, to no page.
    """
    shape = (-(-max_copies // _COPY_GROUP), _COPY_GROUP)
    sources = np.zeros(shape, np.int32)
    targets = np.full(shape, num_pages, np.int32)
    if copies:
        sources.flat[: len(copies)], targets.flat[: len(copies)] = zip(*copies, strict=True)
    both = page_ids(sources, windows), page_ids(targets, windows)
    return *both, np.int32(-(-len(copies) // _COPY_GROUP))


def build_state_copies(
    copies: Sequence[StateCopy], size: int
) -> tuple[np.ndarray, np.ndarray, np.int32]:
    """Sources and targets [size] of the first copies, and their number, at most `size`."""
    sources, targets = np.zeros((2, size), np.int32)
    count = min(len(copies), size)
    if count:
        sources[:count], targets[:count] = zip(*copies[:count], strict=True)
    return sources, targets, np.int32(count)


def page_ids(pages: np.ndarray, windows: np.ndarray | None) -> PageIds:
    """Pages with their window pages; what has none, or is beyond the pool, is beyond the other."""
    if windows is None:
        return PageIds(pages)
    found = np.append(windows, -1)[np.minimum(pages, len(windows))]
    return PageIds(pages, np.where(found < 0, NO_SLOT, found).astype(np.int32))


def no_windows(num_pages: int) -> np.ndarray:
    """The window pages of pages that have none."""
    return np.full(num_pages, -1, np.int32)


def window_table(page_table: np.ndarray, windows: np.ndarray) -> np.ndarray:
    """The table of window pages of a table of pages; negative for pages without one."""
    return windows[page_table]


def window_slots(slots: np.ndarray, windows: np.ndarray, page_size: int) -> np.ndarray:
    """The slots in window pages of tokens with these slots; `NO_SLOT` stays."""
    is_used = slots != NO_SLOT
    pages = windows[slots[is_used] // page_size]
    assert (pages >= 0).all(), "tokens are written without their window pages"
    found = slots.copy()
    found[is_used] = pages * page_size + slots[is_used] % page_size
    return found
