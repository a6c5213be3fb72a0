"""More devices along "tp" than kv heads, so that each head is on several of them.

Runs in processes of its own with eight host devices, since JAX fixes their number at start.
"""

from __future__ import annotations

import pytest

from tests.devices import run_python


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param("placement outputs", marks=pytest.mark.slow),
        pytest.param("families states", marks=pytest.mark.soak),
    ],
)
def test_on_eight_devices(cases):
    """Cases of a process have engines of the same programs."""
    run_python(
        *("-W", "ignore", "-m", "tests.engine.kv_copies_cases", *cases.split()),
        num_devices=8,
    )
