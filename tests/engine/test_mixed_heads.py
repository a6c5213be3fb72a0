"""Layers with different numbers of kv heads, and layers that share keys, over several devices.

Runs in processes of its own with eight host devices, since JAX fixes their number at start.
"""

from __future__ import annotations

import pytest

from tests.devices import run_python


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("refusals", marks=pytest.mark.slow),
        pytest.param("rotation_on_tpus", marks=pytest.mark.slow),
        pytest.param("gpu_kernel", marks=pytest.mark.soak),
        pytest.param("eight_devices", marks=pytest.mark.slow),
        pytest.param("shared_keys", marks=pytest.mark.soak),
        pytest.param("deterministic", marks=pytest.mark.soak),
        pytest.param("tpu_kernel", marks=pytest.mark.soak),
    ],
)
def test_on_eight_devices(case):
    run_python(
        *("-W", "ignore", "-m", "tests.engine.mixed_heads_cases", case),
        num_devices=8,
    )
