"""Experts in parts over the devices of an engine: `expert_parallel_size`.

Runs in processes of its own with eight host devices, since JAX fixes their number at start.
"""

from __future__ import annotations

import pytest

from tests.devices import run_python


@pytest.mark.parametrize(
    "cases",
    [
        "cut refusals",
        pytest.param("serves", marks=pytest.mark.slow),
        pytest.param("group", marks=pytest.mark.soak),
    ],
)
def test_on_eight_devices(cases):
    run_python(
        "-W", "ignore", "-m", "tests.engine.expert_parallel_cases", *cases.split(), num_devices=8
    )
