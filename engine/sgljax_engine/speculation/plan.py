"""Sources of a dispatch's drafts, and what became of them. Host-side data types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

TRIAL_STEPS = 4
"""Steps of a dispatch that finds out how fast they are."""

TOKENS_PER_STEP = 4
"""Tokens of a row that a dispatch with drafts has room for, times its most steps."""


def row_tokens(num_rows: int, num_drafts: int, max_tokens: int) -> tuple[int, ...]:
    """Tokens of a row in a step, ascending: 1 without drafts, and the sizes to choose from."""
    most = min(1 + num_drafts, max_tokens // num_rows)
    return (1, *sorted({size for size in (-(-most // 4), most) if size > 1}))


class RowDrafts(NamedTuple):
    """Sources of one row's drafts, int32, the newest or most useful last.

    `own` are the row's last tokens, drafted from if `drafts_own`.
    """

    history: Sequence[np.ndarray]
    siblings: Sequence[np.ndarray]
    own: np.ndarray
    drafts_own: bool


class StepDrafts(NamedTuple):
    """Drafts of a dispatch; few steps where it is to find out how fast they are."""

    rows: Sequence[RowDrafts]
    row_tokens: int
    max_steps: int


class RowVerified(NamedTuple):
    """Results of a row's drafts in a dispatch, for each of `config.DRAFTERS`.

    `sources` has for each token 0, or 1 plus the index of who drafted it; `num_drafted` were
    verified.
    """

    sources: list[int]
    num_drafted: list[int]

    @property
    def num_right(self) -> list[int]:
        """Tokens that were drafts, for each of `config.DRAFTERS`."""
        return [self.sources.count(1 + index) for index in range(len(self.num_drafted))]
