"""Parameters of tests, split between the fast and the long tier."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def tiered(values: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """One parameter a value; those that are not among the fast ones are marked slow."""
    return [
        pytest.param(value, marks=() if value in fast else pytest.mark.slow) for value in values
    ]


def pairwise(*columns: Sequence[Any], first: Iterable[tuple[Any, ...]] = ()) -> list[tuple]:
    """Few combinations of the columns' values, with each two values of two columns in one of them.

    Args:
        columns: The values of each.
        first: Combinations that are among them.
    """
    rows = list(itertools.product(*columns))
    chosen = list(first)
    missing = set().union(*map(_pairs, rows)).difference(*map(_pairs, chosen))
    while missing:
        chosen.append(max(rows, key=lambda row: len(_pairs(row) & missing)))
        missing -= _pairs(chosen[-1])
    return chosen


def _pairs(row: tuple[Any, ...]) -> set[Any]:
    return set(itertools.combinations(enumerate(row), 2))
