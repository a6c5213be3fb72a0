"""Which implementations an engine uses: of attention, and of projections."""

from __future__ import annotations

from typing import NamedTuple

from sgljax_engine.config import RuntimeConfig
from sgljax_engine.errors import InvalidConfigError
from sgljax_engine.kernels.cpu.ffi import unavailable
from sgljax_engine.kernels.cpu.machine import host_vectors
from sgljax_engine.layers.basic import Layout
from sgljax_engine.runner.placement import Placement


class Backends(NamedTuple):
    """What was picked.

    Attributes:
        attention: One of `config.ATTENTION_BACKENDS`; "auto" is the portable one of the platform.
        linear: "native" or "xla".
        why_not_native: Why machine code of our own is not used where it could have been; None
            where it is used, where options rule it out, and on accelerators.
    """

    attention: str
    linear: str
    why_not_native: str | None = None


def pick_backends(runtime: RuntimeConfig, placement: Placement, head_dim: int) -> Backends:
    """Resolves "auto": to machine code of our own where there can be some.

    Args:
        runtime: What the user asks for.
        placement: Where the engine runs.
        head_dim: The model's.

    Raises:
        InvalidConfigError: when "native" is asked for where it cannot be had.
    """
    problem = _problem(placement)
    attention_problem = problem or _head_problem(head_dim)
    asked = {
        "attention_backend": (runtime.attention_backend, attention_problem),
        "linear_backend": (runtime.linear_backend, problem),
    }
    for name, (backend, reason) in asked.items():
        if backend == "native" and reason is not None:
            raise InvalidConfigError(f"{name} 'native' cannot be had here: {reason}")
    attention, linear = runtime.attention_backend, runtime.linear_backend
    reason = None
    if attention == "auto":
        attention, reason = ("auto", attention_problem) if attention_problem else ("native", None)
    if linear == "auto":
        linear, reason = ("xla", problem) if problem else ("native", reason)
    return Backends(attention, linear, reason if placement.platform == "cpu" else None)


def _problem(placement: Placement) -> str | None:
    """Why operations of machine code cannot be used; None if they can."""
    if placement.platform != "cpu":
        return f"it is for CPUs, the engine's devices are of kind {placement.platform!r}"
    if placement.mesh.size > 1:
        return f"it is for one device, the engine has {placement.mesh.size}"
    if placement.dtype != "float32":
        return f"it is for float32, the engine's dtype is {placement.dtype.name}"
    if placement.layout is not Layout.FEATURES_FIRST:
        return f"it is for features first, activations are {placement.layout.value}"
    return unavailable()


def _head_problem(head_dim: int) -> str | None:
    lanes = host_vectors().lanes
    if head_dim % lanes:
        return f"it needs a head_dim that is a multiple of {lanes}, got {head_dim}"
    return None
