"""Parameters of tests, split between the fast and the long tier."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def tiered(values: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """One parameter a value; those that are not among the fast ones are marked slow."""
    return [
        pytest.param(value, marks=() if value in fast else pytest.mark.slow) for value in values
    ]
