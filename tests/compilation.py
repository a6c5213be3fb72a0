"""Counts what JAX compiles, and says where tests keep it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax

CACHE = Path(__file__).parents[1] / ".jax_cache" / f"jax-{jax.__version__}"
"""The compilation cache of all tests, for this version of JAX; keys include what XLA optimises."""

_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
"""Recorded for every new program, also when the compilation cache then has its executable."""


@contextlib.contextmanager
def recorded_programs() -> Iterator[list[float]]:
    """Collects the lowering seconds of every program that is new to the process, any thread's."""
    lowered: list[float] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _LOWERED:
            lowered.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield lowered
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
