"""Shared test set-up: a compilation cache of the repository's own, and a small heap to collect.

Tests build many engines with equal programs; the cache compiles each once. It is a folder of
this checkout, so that tests neither use nor fill the user's cache.
"""

from __future__ import annotations

import gc
import importlib.util
from pathlib import Path

import jax
import pytest

jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_report_header():
    """Which Tunix is tested with; see `make test-tunix`."""
    spec = importlib.util.find_spec("tunix")
    return f"tunix: {spec and spec.origin}"


@pytest.fixture(scope="module", autouse=True)
def _earlier_modules_are_not_garbage():
    """What JAX keeps of earlier modules is let out of collections, which many tests ask for."""
    gc.collect()
    gc.freeze()
