"""Parameters of tests, split between the tiers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def tiered(
    values: Iterable[Any], fast: Collection[Any], slow: Collection[Any] | None = None
) -> list[Any]:
    """One parameter a value: fast, slow (None for all others), or for the soak."""

    def marks(value: Any) -> Any:
        if value in fast:
            return ()
        return pytest.mark.slow if slow is None or value in slow else pytest.mark.soak

    return [pytest.param(value, marks=marks(value)) for value in values]
