"""More devices along "tp" than kv heads, so that each head is on several of them.

Runs in processes of its own with eight host devices, since JAX fixes their number at start.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.threads import LIMIT_S


@pytest.mark.parametrize(
    "case",
    [
        "placement",
        pytest.param("outputs", marks=pytest.mark.slow),
        pytest.param("families", marks=pytest.mark.slow),
        pytest.param("states", marks=pytest.mark.slow),
        pytest.param("more_families", marks=pytest.mark.slow),
        pytest.param("deterministic", marks=pytest.mark.slow),
    ],
)
def test_on_eight_devices(case):
    env = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.engine.kv_copies_cases", case],
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0, result.stderr[-4000:]
