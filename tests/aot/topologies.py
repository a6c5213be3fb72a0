"""Compilers for devices that are not here, where they are installed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

LIBRARY = os.environ.get("TPU_LIBRARY_PATH")
HAS_LIBTPU = (
    Path(LIBRARY).is_file()
    if LIBRARY is not None
    else importlib.util.find_spec("libtpu") is not None
)

needs_libtpu = pytest.mark.skipif(
    not HAS_LIBTPU,
    reason='libtpu is not installed: pip install "tunix-sgljax[aot]", or set TPU_LIBRARY_PATH',
)

HAS_CUDA_PLUGIN = importlib.util.find_spec("jax_plugins") is not None and (
    importlib.util.find_spec("jax_plugins.xla_cuda13") is not None
)

needs_cuda_plugin = pytest.mark.skipif(
    not HAS_CUDA_PLUGIN,
    reason="JAX's CUDA plugin is not installed: pip install jax-cuda13-plugin jax-cuda13-pjrt",
)


def compiler_variables() -> dict[str, str]:
    """The environment of a process that compiles as users do.

    The tests' own settings, which have XLA optimise little and keep programs, are left out.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_COMPILATION_CACHE_DIR")
    } | {"JAX_PLATFORMS": "cpu"}
