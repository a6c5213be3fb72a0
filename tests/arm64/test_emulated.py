"""The CPU kernels on an emulated ARM64: the bits of x86-64 with eight lanes.

Emulation neither shows faults of memory order, which x86-64 underneath forgives, nor speed.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

import sgljax_cpu
from tests.arm64 import bits, userland
from tests.threads import LIMIT_S

_PROBLEM = userland.missing() or sgljax_cpu.unavailable()
_SCRIPT = ("-m", "tests.arm64.bits")


@pytest.mark.soak
@pytest.mark.skipif(_PROBLEM is not None, reason=f"no emulated ARM64 here: {_PROBLEM}")
def test_bits_are_those_of_x86_64():
    """Tokens and log-probs of greedy and seeded requests, in float32."""
    userland.make()
    here = subprocess.run(
        [sys.executable, *_SCRIPT], check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S
    ).stdout.splitlines()
    there = userland.run(*_SCRIPT, timeout_s=6 * LIMIT_S).splitlines()
    assert (here[0], there[0]) == ("x86_64", "aarch64")
    assert len(here) == 1 + bits.NUM_REQUESTS
    assert there[1:] == here[1:]
