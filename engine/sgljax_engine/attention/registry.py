"""Selects an engine's attention backends; the only place that knows them by name."""

from __future__ import annotations

from typing import Literal, NamedTuple

from sgljax_engine.attention.base import DecodeAttention, PagedAttention
from sgljax_engine.attention.batch_invariant import ordered_backend
from sgljax_engine.attention.cpu import native_attention, native_decode_attention
from sgljax_engine.attention.xla import xla_attention, xla_tiles_attention
from sgljax_engine.errors import InvalidConfigError
from sgljax_engine.kernels.cpu.machine import host_vectors
from sgljax_engine.layers.target import Target

PORTABLE: dict[str, PagedAttention] = {
    "xla": xla_attention,
    "xla_tiles": xla_tiles_attention,
}
"""Portable implementations by name."""


ContiguousKV = Literal["never", "if_it_fits", "always"]


class AttentionBackend(NamedTuple):
    """What a choice of attention implies.

    Attributes:
        name: Name of `attend`, for reports: one of `config.ATTENTION_BACKENDS`.
        attend: Attention over pages, for prefill and scoring, and for decode without its own.
        batch_invariant: `attend` for an engine with deterministic sampling.
        decode: Attention that decode uses instead, if any.
        contiguous_kv: Whether decode copies its rows' keys into contiguous KV
            (`attention.contiguous`).
        why_not_native: Why "auto" did not pick "native" on a CPU; None elsewhere.
    """

    name: str
    attend: PagedAttention
    batch_invariant: PagedAttention
    decode: DecodeAttention | None = None
    contiguous_kv: ContiguousKV = "never"
    why_not_native: str | None = None


def pick_attention(name: str, target: Target, head_dim: int) -> AttentionBackend:
    """The backend of that name; "auto" picks the fastest one that is tested on the target.

    Args:
        name: One of `config.ATTENTION_BACKENDS`.
        target: What the engine runs on.
        head_dim: The model's head_dim.

    Raises:
        InvalidConfigError: when the named backend is not available.
    """
    problem = target.cpu_kernels_problem() or _head_problem(head_dim)
    if name == "native" and problem is not None:
        raise InvalidConfigError(f"attention_backend 'native' cannot be had here: {problem}")
    if name == "native" or (name == "auto" and problem is None):
        return AttentionBackend(
            "native", native_attention, native_attention, native_decode_attention
        )
    batch_invariant = ordered_backend(target.platform)
    if name == "pallas":
        # Imported here: Pallas takes a tenth of a second to import, and JAX may drop it.
        from sgljax_engine.attention.pallas import gpu_backend

        gpu = gpu_backend(
            target.platform, head_dim=head_dim, num_tensor_shards=target.num_tensor_shards
        )
        return AttentionBackend("pallas", gpu, batch_invariant)
    is_cpu = target.platform == "cpu"
    if name == "xla_rows":
        portable = "xla_tiles"
        contiguous_kv = "always"
    elif name == "auto":
        portable = "xla_tiles" if is_cpu else "xla"
        contiguous_kv = "if_it_fits" if is_cpu else "never"
    else:
        portable, contiguous_kv = name, "never"
    return AttentionBackend(
        portable,
        PORTABLE[portable],
        batch_invariant,
        contiguous_kv=contiguous_kv,
        why_not_native=problem if name == "auto" and is_cpu else None,
    )


def _head_problem(head_dim: int) -> str | None:
    lanes = host_vectors().lanes
    if head_dim % lanes:
        return f"it needs a head_dim that is a multiple of {lanes}, got {head_dim}"
    return None
