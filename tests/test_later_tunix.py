"""`tunix_sgljax.experimental` with the layout that Tunix's main has after c7d8950f."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tunix_experimental import HAS_EXPERIMENTAL

ROOT = Path(__file__).parents[1]
TESTS = ("test_artifacts.py", "test_sampler.py", "test_weight_sync.py")


@pytest.mark.soak
@pytest.mark.skipif(HAS_EXPERIMENTAL, reason="this Tunix has an experimental package of its own")
def test_the_samplers_tests_pass_with_stand_ins_of_the_later_layout():
    files = [f"tests/experimental/{name}" for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.later_tunix", "-n0", *files]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-5000:]
    assert " passed" in ended.stdout
    assert "failed" not in ended.stdout
