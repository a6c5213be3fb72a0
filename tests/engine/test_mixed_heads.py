"""Layers with different numbers of kv heads, and layers that share keys, over several devices.

Runs in processes of its own with eight host devices, since JAX fixes their number at start.
"""

from __future__ import annotations

import pytest

from tests.devices import run_python


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param("refusals rotation_on_tpus", marks=pytest.mark.slow),
        pytest.param("eight_devices gpu_kernel tpu_kernel shared_keys", marks=pytest.mark.soak),
    ],
)
def test_on_eight_devices(cases):
    run_python(
        *("-W", "ignore", "-m", "tests.engine.mixed_heads_cases", *cases.split()), num_devices=8
    )
