"""Sources of a dispatch's drafts. Host-side data types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

ACCEPTANCE_KINDS = 3
"""Drafts without a match, of a short and of a long one are right more or less often."""

HOPE, HOPE_RATE = 0.7, 1 / 1024
"""Limit of an acceptance while nothing is drafted, so that drafts are tried now and then."""

MOST_CERTAIN = 0.98
"""No acceptance counts as more, so that a draft is worth less than the one before it."""

TOKENS_PER_STEP = 4
"""Tokens of a row that a dispatch with drafts has room for, times its most steps."""


def expected_right(acceptance: Any, count: Any) -> Any:
    """How many of so many drafts are right, up to the first wrong one, on average.

    Args:
        acceptance: Share of right drafts, below 1: a number or an array, of JAX too.
        count: Drafts: a number or an array.
    """
    return acceptance * (1 - acceptance**count) / (1 - acceptance)


class RowDrafts(NamedTuple):
    """Sources of one row's drafts.

    Attributes:
        history: Earlier answers to the prompt, int32, the newest last.
        siblings: Other samples of the group, int32, the most useful last.
        own: The row's own last tokens, int32, its newest last.
        drafts_own: Whether to draft from them.
        acceptance: Expected share of right drafts, for each of `ACCEPTANCE_KINDS`.
        weight: What a token of this row is worth, compared with others.
    """

    history: Sequence[np.ndarray]
    siblings: Sequence[np.ndarray]
    own: np.ndarray
    drafts_own: bool
    acceptance: Sequence[float]
    weight: float


class RowVerified(NamedTuple):
    """Results of a row's drafts in a dispatch.

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
