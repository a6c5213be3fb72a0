"""Has XLA optimise little, which saves a third and more of the time to compile on CPUs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax._src import compiler

from sgljax_engine.layers import devices

_RANDOM = ("_normal", "_randint", "_truncated_normal", "_uniform", "_threefry_fold_in", "split")
_OPERATIONS = (
    *("_einsum", "_mean", "_power", "_reduce_all", "_squeeze", "_where", "add"),
    *("broadcast_in_dim", "concatenate", "convert_element_type", "cos", "cumsum", "divide"),
    *("dot_general", "dynamic_slice", "equal", "exp", "gather", "integer_pow", "less", "maximum"),
    *("multiply", "reshape", "scatter", "select_n", "silu", "sin", "sqrt", "subtract", "take"),
    *("transpose", "true_divide"),
)
_TUNIX = ("_decode_fn", "_eval_step", "_prefill_fn", "_train_step", "compute_per_token_logps")
OTHERS = {f"jit_{name}" for name in (*_RANDOM, *_OPERATIONS, *_TUNIX)}
"""Programs that are not the engine's: JAX's random numbers and operations one by one, and Tunix's.

They make what tests feed to the engine, or compare it with. Optimised or not, they are exact
enough to compare with; compiling one for each shape would take most of a run.
"""

AS_USERS = "TRAINER_AS_USERS"
"""A module's name for why Tunix's programs are compiled as users do: it compares bits with them."""

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


_is_as_users = False


@contextlib.contextmanager
def as_users() -> Iterator[None]:
    """Programs of this block are all compiled as users compile them."""
    global _is_as_users
    jax.clear_caches()
    _is_as_users = True
    try:
        yield
    finally:
        _is_as_users = False
        jax.clear_caches()


def others_quickly() -> None:
    """From now on the programs of `OTHERS` are optimised little, but for `as_users`. Idempotent."""
    real = compiler.compile_or_get_cached
    if real.__module__ == __name__:
        return

    def compile_or_get_cached(
        backend: Any, computation: Any, devices: Any, options: Any, *args: Any, **kwargs: Any
    ) -> Any:
        name = computation.operation.attributes["sym_name"].value
        if name in OTHERS and not _is_as_users:
            debug = options.executable_build_options.debug_options
            debug.xla_backend_optimization_level = 0
            debug.xla_llvm_disable_expensive_passes = True
            _leave_out_mlir(options, _overrides())
        return real(backend, computation, devices, options, *args, **kwargs)

    compiler.compile_or_get_cached = compile_or_get_cached


def is_on() -> bool:
    """Whether programs of this process, and of those that it starts, are optimised little."""
    return os.environ.get(_VARIABLE) == "1"


def variables(flags: list[str]) -> dict[str, str]:
    """The environment of a child process for the same, on CPUs; with further XLA flags."""
    left_out = [f"--{name}={str(value).lower()}" for name, value in _overrides()]
    return {_VARIABLE: "1", "XLA_FLAGS": " ".join([*flags, *left_out])}


def _leave_out_mlir(options: Any, overrides: list[tuple[str, str | bool]]) -> None:
    """Changes compile options that do not say otherwise themselves."""
    named = dict(options.env_option_overrides)
    options.env_option_overrides += [each for each in overrides if each[0] not in named]


def _overrides() -> list[tuple[str, str | bool]]:
    """What leaves MLIR out. To find it a program is compiled, which is not one of `OTHERS`."""
    is_cpu = jax.default_backend() == "cpu"
    options = devices.known_option(is_cpu, "xla_cpu_use_fusion_emitters", False)
    return list((options or {}).items())
