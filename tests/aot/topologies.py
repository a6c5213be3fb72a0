"""Compilers for devices that are not here, where they are installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.threads import LIMIT_S

ROOT = Path(__file__).parents[2]
LIBRARY = os.environ.get("TPU_LIBRARY_PATH")
HAS_LIBTPU = (
    Path(LIBRARY).is_file()
    if LIBRARY is not None
    else importlib.util.find_spec("libtpu") is not None
)

needs_libtpu = pytest.mark.skipif(
    not HAS_LIBTPU,
    reason="libtpu is not installed: pip install libtpu, or set TPU_LIBRARY_PATH",
)

HAS_CUDA_PLUGIN = importlib.util.find_spec("jax_plugins") is not None and (
    importlib.util.find_spec("jax_plugins.xla_cuda13") is not None
)

needs_cuda_plugin = pytest.mark.skipif(
    not HAS_CUDA_PLUGIN,
    reason="JAX's CUDA plugin is not installed: pip install jax-cuda13-plugin jax-cuda13-pjrt",
)


def run_compiler(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs Python in a process that compiles as users do: libtpu reads its settings once.

    The tests' own settings, which have XLA optimise little and keep programs, are left out.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_COMPILATION_CACHE_DIR")
    }
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=variables | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
