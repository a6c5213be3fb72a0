"""Both samplers, for tests of what they have in common."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator

import pytest

from sgljax_cpu import chain
from sgljax_engine.sampling import sampler
from sgljax_engine.sampling.native import NATIVE

SAMPLERS = {"xla": sampler.XLA, "native": NATIVE}


def patched(module: types.ModuleType, name: str) -> Iterator[str]:
    """Puts a sampler into a test module's `sample` while a fixture lives."""
    if name == "native" and chain.unavailable() is not None:
        pytest.skip(f"no JIT-compiled CPU kernels here: {chain.unavailable()}")
    with pytest.MonkeyPatch.context() as patch:
        chosen = functools.partial(sampler.sample, sampler=SAMPLERS[name])
        patch.setattr(module, "sample", chosen)
        yield name
