"""Shared test set-up: what compiles and where it is kept, and a small heap to collect.

Tests build many engines with equal programs; the cache compiles each once. It is a folder of
this checkout, so that tests neither use nor fill the user's cache.

Tests compile the engine's programs as users do. A module that looks at host logic alone may have
XLA optimise little, where compiling is what takes its time: `QUICK_COMPILE = "why it checks no
numbers"` at its top. One that compares arrays, log-probs, tokens of two runs or goldens must not:
`test_quick_compile.py`. Tunix's programs and JAX's single operations are optimised little
everywhere, but for modules whose subject is the trainer's bits: `TRAINER_AS_USERS = "why"`. Bits
that come from one program, called twice, may be compared anywhere.
"""

from __future__ import annotations

import gc
import importlib.util
import signal

import hypothesis
import pytest

from tests import compilation, quick_compile
from tests.tunix_experimental import HAS_EXPERIMENTAL

compilation.keep_programs()
quick_compile.others_quickly()

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")

# A shell that starts this in the background has it, and its child processes, ignore interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# These tests import what Tunix has from 0.1.8 on: `make test-tunix TUNIX=<checkout>` runs them.
collect_ignore_glob = [] if HAS_EXPERIMENTAL else ["experimental", "experimental/*"]


def pytest_sessionstart(session):
    """One process of a run keeps the cache small, before the others look into it."""
    if not hasattr(session.config, "workerinput"):
        compilation.prune()


def pytest_report_header():
    """Which Tunix is tested with, and what it is too old for; see `make test-tunix`."""
    spec = importlib.util.find_spec("tunix")
    note = "" if HAS_EXPERIMENTAL else "; it has no tunix.experimental: tests/experimental left out"
    return f"tunix: {spec and spec.origin}{note}"


def pytest_collection_modifyitems(items):
    """Puts those first that are marked so, and modules that compile quickly last, side by side."""
    items.sort(
        key=lambda item: (
            item.get_closest_marker("first") is None,
            hasattr(item.module, quick_compile.MARK),
        )
    )


@pytest.fixture(scope="module", autouse=True)
def _compiles_as_the_module_says(request):
    """Programs of two kinds must not meet; child processes follow `QUICK_COMPILE` alone."""
    if hasattr(request.module, quick_compile.MARK):
        with quick_compile.quickly():
            yield
    elif hasattr(request.module, quick_compile.AS_USERS):
        with quick_compile.as_users():
            yield
    else:
        yield


@pytest.fixture(scope="module", autouse=True)
def _earlier_modules_are_not_garbage():
    """What JAX keeps of earlier modules is let out of collections, which many tests ask for."""
    gc.collect()
    gc.freeze()
