"""The kernels and the attention of an engine, and the refusals of deterministic sampling."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from sgljax_engine.attention.base import Attention
from sgljax_engine.attention.registry import attention_problem, engine_attention
from sgljax_engine.config import EngineConfig
from sgljax_engine.errors import InvalidConfigError
from sgljax_engine.layers.kernels import CpuKernels, Kernels, pick_kernels
from sgljax_engine.layers.target import Target
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models.registry import get_model


class Backends(NamedTuple):
    """What an engine computes with; `kernels` are those of all but attention."""

    kernels: Kernels
    attention: Attention

    @property
    def is_native(self) -> bool:
        return isinstance(self.kernels, CpuKernels)


def engine_backends(config: EngineConfig, model: ModelConfig, target: Target) -> Backends:
    """Refuses unavailable backends, and unordered sums where sampling is deterministic."""
    runtime = config.runtime
    kernels = pick_kernels(runtime.linear_backend, target).kernels
    if runtime.enable_deterministic_sampling:
        kernels = _batch_invariant(kernels, config, model, target)
    has_values = model.attention.has_values
    attention = engine_attention(
        runtime.attention_backend,
        target,
        model.head_dims,
        kernels,
        has_values=has_values,
        kv_cache_dtype=runtime.kv_cache_dtype,
    )
    if runtime.enable_deterministic_sampling and attention.name == "xla":
        own = "native" if target.platform == "cpu" else "pallas"
        problem = attention_problem(own, target, model.head_dims, has_values=has_values)
        raise _not_deterministic(f"attention_backend {own!r} is not used, since {problem}")
    return Backends(kernels, attention)


def _batch_invariant(
    kernels: Kernels, config: EngineConfig, model: ModelConfig, target: Target
) -> Kernels:
    if kernels.is_batch_invariant:
        return kernels
    if kernels.fused is None:
        own, problem = "native", target.cpu_kernels_problem()
        if target.platform == "gpu":
            from sgljax_engine.layers.fused import fused_problem

            own, problem = "pallas", fused_problem(target)
        raise _not_deterministic(
            "XLA's products add in an order that depends on the batch, and linear_backend "
            f"{own!r} is not used, since {problem or f'it is {config.runtime.linear_backend!r}'}"
        )
    from sgljax_engine.layers.invariant import InvariantKernels, is_served

    attention, runtime = model.attention, config.runtime
    quantization = runtime.quantization
    specs = get_model(model.architecture).param_specs(model).values()
    sizes = [spec.shape for spec in specs if spec.kind.is_projection]
    problems = {
        "experts": model.moe is not None,
        "recurrent states": model.linear_attention is not None,
        "latents": attention.latent is not None,
        "keys that several layers share, or that are values too": bool(attention.kv_layers)
        or attention.full_kv is not None,
        "adapters (max_loras)": bool(config.lora.max_loras),
        f"quantization {quantization!r}": quantization is not None,
        f"kv_cache_dtype {runtime.kv_cache_dtype!r}": runtime.kv_cache_dtype != "auto",
        "projections of these sizes and this dtype": not is_served(sizes, jnp.dtype(target.dtype)),
    }
    found = [name for name, is_there in problems.items() if is_there]
    if found:
        raise _not_deterministic(f"the kernels with a fixed order do not take {found[0]}")
    return InvariantKernels.make()


def _not_deterministic(why: str) -> InvalidConfigError:
    return InvalidConfigError(f"enable_deterministic_sampling cannot be had here: {why}")
