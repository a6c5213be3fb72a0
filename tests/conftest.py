"""Shared test set-up: a compilation cache of the repository's own, and a small heap to collect.

Tests build many engines with equal programs; the cache compiles each once. It is a folder of
this checkout, so that tests neither use nor fill the user's cache.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import jax
import pytest
from jax._src import compiler

from tests.tunix_experimental import HAS_EXPERIMENTAL

jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

_EMITTERS = "xla_cpu_use_fusion_emitters"
_get_compile_options = compiler.get_compile_options


def _options_without_emitters(*args: Any, **kwargs: Any) -> Any:
    """Where XLA optimises little, it leaves MLIR out too: that was half of its time on CPUs."""
    options = _get_compile_options(*args, **kwargs)
    if jax.default_backend() != "cpu":
        return options
    is_named = _EMITTERS in dict(options.env_option_overrides)
    if os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "1" and not is_named:
        options.env_option_overrides += [(_EMITTERS, False)]
    return options


compiler.get_compile_options = _options_without_emitters


# A shell that starts this in the background has it, and its child processes, ignore interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# These tests import what Tunix has from 0.1.8 on: `make test-tunix TUNIX=<checkout>` runs them.
collect_ignore_glob = [] if HAS_EXPERIMENTAL else ["experimental", "experimental/*"]


def pytest_report_header():
    """Which Tunix is tested with, and what it is too old for; see `make test-tunix`."""
    spec = importlib.util.find_spec("tunix")
    note = "" if HAS_EXPERIMENTAL else "; it has no tunix.experimental: tests/experimental left out"
    return f"tunix: {spec and spec.origin}{note}"


def pytest_collection_modifyitems(items):
    """Puts those first that are marked so, and leaves the rest in its order."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


@pytest.fixture(scope="module", autouse=True)
def _compiles_quickly(request):
    """XLA optimises little, which nearly halves the tests' time, except where bits are compared.

    Programs that round otherwise must not meet: a module with `COMPARES_BITS = True` compiles its
    own. Child processes inherit the setting.
    """
    is_quick = str(int(not getattr(request.module, "COMPARES_BITS", False)))
    if os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") != is_quick:
        jax.clear_caches()
        jax.config.update("jax_disable_most_optimizations", is_quick == "1")
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = is_quick


@pytest.fixture(scope="module", autouse=True)
def _earlier_modules_are_not_garbage():
    """What JAX keeps of earlier modules is let out of collections, which many tests ask for."""
    gc.collect()
    gc.freeze()
