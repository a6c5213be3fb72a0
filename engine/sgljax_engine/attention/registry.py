"""Selects an engine's attention; the only place that knows the backends by name.

A new backend is a file of this folder, a branch of `engine_attention`, and its name in
`config.ATTENTION_BACKENDS`.
"""

from __future__ import annotations

from collections.abc import Sequence

from sgljax_engine.attention.base import Attention
from sgljax_engine.attention.cpu import NativeAttention, native_problem
from sgljax_engine.attention.xla import XlaAttention
from sgljax_engine.errors import InvalidConfigError
from sgljax_engine.layers.kernels import Kernels
from sgljax_engine.layers.target import Target, require_backend


def engine_attention(
    name: str,
    target: Target,
    head_dims: Sequence[int],
    kernels: Kernels,
    *,
    has_values: bool = True,
    kv_cache_dtype: str = "auto",
) -> Attention:
    """Picks, for "auto", the fastest backend that is tested on the target."""
    if kv_cache_dtype != "auto" and target.platform == "tpu" and name != "xla":
        # Not XLA's for "auto": it takes more time than smaller pages save.
        raise InvalidConfigError(
            f"kv_cache_dtype {kv_cache_dtype!r} cannot be had with the attention kernel of TPUs, "
            "whose pages are no whole tiles of 8-bit numbers; attention_backend='xla' reads them"
        )
    if name == "auto":
        name = _fastest(target, head_dims, has_values)
    elif name != "xla":
        problem = attention_problem(name, target, head_dims, has_values=has_values)
        require_backend(problem, f"attention_backend {name!r}")
    if name == "native":
        return NativeAttention()
    if name == "tpu":
        from sgljax_engine.attention.tpu import tpu_attention

        return tpu_attention(target, head_dims)
    if name == "pallas":
        from sgljax_engine.attention.pallas import gpu_attention

        return gpu_attention(target, kernels, is_int8=kv_cache_dtype == "int8")
    return XlaAttention()


def attention_problem(
    name: str, target: Target, head_dims: Sequence[int], *, has_values: bool = True
) -> str | None:
    """Why the backend "native", "tpu" or "pallas" cannot be used; None if it can.

    Without values, the cache holds latents.
    """
    # Pallas takes a tenth of a second to import.
    if name == "tpu":
        from sgljax_engine.attention.tpu import tpu_problem

        problem = tpu_problem(target, head_dims)
        return problem if problem or has_values else "its kernel does not read latents"
    if name == "pallas":
        from sgljax_engine.attention.pallas import gpu_problem
        from sgljax_engine.kernels.gpu.paged_attention import head_parts

        if not has_values:
            head_dims = [part for head_dim in head_dims for part in head_parts(head_dim)]
        return gpu_problem(target, head_dims)
    return native_problem(target, head_dims)


def _fastest(target: Target, head_dims: Sequence[int], has_values: bool) -> str:
    own = {"cpu": "native", "tpu": "tpu", "gpu": "pallas"}.get(target.platform)
    if own is None or attention_problem(own, target, head_dims, has_values=has_values):
        return "xla"
    return own
