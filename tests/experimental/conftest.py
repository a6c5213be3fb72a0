"""Fixtures of the tests with Tunix's experimental package.

`tests/conftest.py` leaves this folder out where Tunix has no such package, as 0.1.7.
"""

from __future__ import annotations

import pytest

from tests import tunix_reference as ref
from tests.adapter.helpers import MODEL


@pytest.fixture(scope="session")
def model():
    """A Tunix Qwen3 that no test may change."""
    return ref.make_tunix_qwen3(MODEL)


@pytest.fixture(scope="session")
def other_model():
    """The same shape with other weights; no test may change it either."""
    return ref.make_tunix_qwen3(MODEL, seed=1234)
