from __future__ import annotations

from typing import NamedTuple

LANES = 128
"""Lanes of a vector register."""


class Scores(NamedTuple):
    """How products of queries and keys become scores; as of `attention.base.AttentionOptions`."""

    scale: float
    sliding_window: int | None = None
    logit_softcap: float | None = None


class Sizes(NamedTuple):
    """Static sizes."""

    step_blocks: int
    num_queries: int
    chunk_pages: int
    page_size: int

    @property
    def step_tokens(self) -> int:
        return self.step_blocks * self.num_queries

    @property
    def chunk_tokens(self) -> int:
        return self.chunk_pages * self.page_size

    @property
    def block_pages(self) -> int:
        """Pages that the new tokens of a block can lie in."""
        return self._pages_of(self.num_queries)

    @property
    def step_pages(self) -> int:
        """Pages that the new tokens of a step can lie in, if they are one run."""
        return self._pages_of(self.step_tokens)

    def _pages_of(self, num_tokens: int) -> int:
        return -(-(num_tokens - 1) // self.page_size) + 1
