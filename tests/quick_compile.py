"""Has XLA optimise little, which saves a third and more of the time to compile on CPUs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax._src import compiler

from sgljax_engine import xla_options

RANDOM = {"jit__normal", "jit__randint", "jit__truncated_normal", "jit__uniform"}
"""JAX's programs for random numbers, which make the weights of Tunix's models.

Optimised, each shape takes a second and more.
"""

OF_TUNIX = {
    "jit__decode_fn",
    "jit__eval_step",
    "jit__prefill_fn",
    "jit__train_step",
    "jit_compute_per_token_logps",
}
"""Tunix's programs: its sampler's, and those that train and score.

Tests hold ours against what they compute, and XLA's optimisations change none of that. Optimised,
a training step of a tiny model takes ten seconds.
"""

MARK = "QUICK_COMPILE"
"""A module's name for why it may; see conftest."""

_VARIABLE = "JAX_DISABLE_MOST_OPTIMIZATIONS"


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """Programs of this block, and of child processes that it starts, are optimised little.

    On CPUs they are made without MLIR too, where JAX still has the option: that is most of it.
    """
    real = compiler.get_compile_options
    overrides = _overrides()  # Compiles, once: so not in what follows.

    def get_compile_options(*args: Any, **kwargs: Any) -> Any:
        options = real(*args, **kwargs)
        _leave_out_mlir(options, overrides)
        return options

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", get_compile_options)
        patch.setenv(_VARIABLE, "1")
        jax.clear_caches()
        jax.config.update("jax_disable_most_optimizations", True)
        try:
            yield
        finally:
            jax.clear_caches()
            jax.config.update("jax_disable_most_optimizations", False)


def always_quickly_for_inputs() -> None:
    """From now on programs that are not ours are optimised little, in all modules.

    They give tests their inputs and what is expected, and are never what a test looks at: those for
    random numbers, and Tunix's. Idempotent.
    """
    real = compiler.compile_or_get_cached
    if real.__module__ == __name__:
        return

    def compile_or_get_cached(
        backend: Any, computation: Any, devices: Any, options: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if computation.operation.attributes["sym_name"].value in RANDOM | OF_TUNIX:
            debug = options.executable_build_options.debug_options
            debug.xla_backend_optimization_level = 0
            debug.xla_llvm_disable_expensive_passes = True
            _leave_out_mlir(options, _overrides())
        return real(backend, computation, devices, options, *args, **kwargs)

    compiler.compile_or_get_cached = compile_or_get_cached


def flags() -> list[str]:
    """XLA flags of a child process, which is on CPUs, for the same."""
    if os.environ.get(_VARIABLE) != "1":
        return []
    return [f"--{name}={str(value).lower()}" for name, value in _overrides()]


def _leave_out_mlir(options: Any, overrides: list[tuple[str, str | bool]]) -> None:
    """Changes compile options that do not say otherwise themselves."""
    named = dict(options.env_option_overrides)
    options.env_option_overrides += [each for each in overrides if each[0] not in named]


def _overrides() -> list[tuple[str, str | bool]]:
    """What leaves MLIR out. To find it a program is compiled, which is none of those."""
    is_cpu = jax.default_backend() == "cpu"
    options = xla_options.known_option(is_cpu, "xla_cpu_use_fusion_emitters", False)
    return list((options or {}).items())
