"""Selects an engine's attention backend; the only place that knows them by name.

A new backend is a file of this folder, a line of `BACKENDS`, and its name in the configuration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from sgljax_engine.attention.base import AttentionBackend, ContiguousKV, PagedAttention
from sgljax_engine.attention.batch_invariant import ordered_backend
from sgljax_engine.attention.cpu import native_backend, native_problem
from sgljax_engine.attention.xla import xla_attention, xla_tiles_attention
from sgljax_engine.config import RuntimeConfig
from sgljax_engine.layers.target import Target

PORTABLE: dict[str, PagedAttention] = {
    "xla": xla_attention,
    "xla_tiles": xla_tiles_attention,
}
"""Portable implementations by name."""


def _portable(
    target: Target, head_dims: Sequence[int], *, name: str, contiguous_kv: ContiguousKV = "never"
) -> AttentionBackend:
    del head_dims
    return AttentionBackend(
        name,
        PORTABLE[name],
        ordered_backend(target.platform),
        contiguous_kv=contiguous_kv,
        contiguous_name="xla_rows",
    )


def _auto(target: Target, head_dims: Sequence[int]) -> AttentionBackend:
    """The fastest one that is tested on the target."""
    problem = native_problem(target, head_dims)
    if problem is None:
        return native_backend(target, head_dims)
    if target.platform == "tpu":
        from sgljax_engine.attention.tpu import tpu_problem

        if tpu_problem(target, head_dims) is None:
            return _tpu(target, head_dims)
    if target.platform == "gpu":
        from sgljax_engine.attention.pallas import gpu_problem

        if gpu_problem(target, head_dims) is None:
            return _pallas(target, head_dims)
    if target.platform != "cpu":
        return _portable(target, head_dims, name="xla")
    picked = _portable(target, head_dims, name="xla_tiles", contiguous_kv="if_it_fits")
    return picked._replace(why_not_native=problem)


def _pallas(target: Target, head_dims: Sequence[int]) -> AttentionBackend:
    # Imported here: Pallas takes a tenth of a second to import.
    from sgljax_engine.attention.pallas import gpu_backend

    return gpu_backend(target, head_dims)


def _tpu(target: Target, head_dims: Sequence[int]) -> AttentionBackend:
    # Imported here, as for a GPU.
    from sgljax_engine.attention.tpu import tpu_backend

    return tpu_backend(target, head_dims)


BACKENDS: dict[str, Callable[[Target, Sequence[int]], AttentionBackend]] = {
    "auto": _auto,
    "native": native_backend,
    "xla": functools.partial(_portable, name="xla"),
    "xla_tiles": functools.partial(_portable, name="xla_tiles"),
    "xla_rows": functools.partial(_portable, name="xla_tiles", contiguous_kv="always"),
    "pallas": _pallas,
    "tpu": _tpu,
}
"""(target, head_dims) -> what a backend implies; raises InvalidConfigError if it is not available.

The names are those of `config.ATTENTION_BACKENDS`.
"""


def pick_attention(name: str, target: Target, head_dims: Sequence[int]) -> AttentionBackend:
    """The backend of that name; "auto" picks the fastest one that is tested on the target.

    Args:
        name: One of `BACKENDS`.
        target: What the engine runs on.
        head_dims: Those of the model's layers, see `ModelConfig.head_dims`.

    Raises:
        InvalidConfigError: when the named backend is not available.
    """
    return BACKENDS[name](target, head_dims)


def engine_attention(
    runtime: RuntimeConfig, target: Target, head_dims: Sequence[int]
) -> AttentionBackend:
    """The attention of an engine, with deterministic sampling too.

    Args:
        runtime: Names the backend.
        target: As for `pick_attention`.
        head_dims: As for `pick_attention`.

    Raises:
        InvalidConfigError: when the named backend is not available.
    """
    picked = pick_attention(runtime.attention_backend, target, head_dims)
    return picked.for_engine(is_deterministic=bool(runtime.enable_deterministic_sampling))
