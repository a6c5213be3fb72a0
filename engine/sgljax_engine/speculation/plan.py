"""What a dispatch may draft from. Host-side data types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ACCEPTANCE_KINDS = 3
"""Drafts without a match, of a short and of a long one are right more or less often."""

HOPE, HOPE_RATE = 0.7, 1 / 1024
"""Where an acceptance goes while nothing is drafted, so that it is tried again now and then."""

TOKENS_PER_STEP = 4
"""Tokens of a row that a dispatch with drafts has room for, times its most steps."""


class RowDrafts(NamedTuple):
    """What one row may draft from.

    Attributes:
        history: Earlier answers to the prompt, int32, the newest last.
        siblings: Other samples of the group, int32, the most useful last.
        own: The row's own last tokens, int32, its newest last.
        drafts_own: Whether to draft from them.
        limit: Most drafts in a step.
        acceptance: Expected share of right drafts, for each of `ACCEPTANCE_KINDS`.
        weight: What a token of this row is worth, compared with others.
    """

    history: Sequence[np.ndarray]
    siblings: Sequence[np.ndarray]
    own: np.ndarray
    drafts_own: bool
    limit: int
    acceptance: Sequence[float]
    weight: float


class RowVerified(NamedTuple):
    """What became of a row's drafts in a dispatch.

    Attributes:
        sources: For each token 0, or 1 plus the index in `config.DRAFTERS` of who drafted it.
        num_drafted, num_right: Drafts that were verified, and were right, for each of
            `config.DRAFTERS`.
        acceptance: As of `RowDrafts`, after the dispatch.
    """

    sources: list[int]
    num_drafted: list[int]
    num_right: list[int]
    acceptance: list[float]
