"""More devices along "tp" than kv heads, so that each head is on several of them.

Runs in processes of its own with eight host devices, since JAX fixes their number at start.
"""

from __future__ import annotations

import pytest

from tests.devices import run_python


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("placement", marks=pytest.mark.soak),
        pytest.param("outputs", marks=pytest.mark.soak),
        pytest.param("families", marks=pytest.mark.soak),
        pytest.param("states", marks=pytest.mark.soak),
    ],
)
def test_on_eight_devices(case):
    run_python(
        *("-W", "ignore", "-m", "tests.engine.kv_copies_cases", case),
        num_devices=8,
    )
