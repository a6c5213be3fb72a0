from __future__ import annotations

import dataclasses
import math

import jax

from sgljax_engine.attention.registry import engine_attention
from sgljax_engine.config import EngineConfig, ParallelConfig
from sgljax_engine.errors import InvalidConfigError
from sgljax_engine.layers.kernels import pick_kernels
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.placement.submeshes import check_divides, place, share_out
from sgljax_engine.runner.kv.memory_plan import engine_free_bytes, expected_weights_bytes
from sgljax_engine.runner.kv.window_plan import bytes_per_token


class NoSizeFits(InvalidConfigError):
    """`tp_size` "auto" finds no size whose memory suffices; `tried_last` is the largest."""

    def __init__(self, message: str, tried_last: ParallelConfig) -> None:
        super().__init__(message)
        self.tried_last = tried_last


def fit_parallel(
    model: ModelConfig,
    config: EngineConfig,
    mesh: jax.sharding.Mesh | None,
    dtype: str,
    device_bytes: int | None = None,
) -> ParallelConfig:
    """Replaces "auto", and sizes that cannot fit the devices' memory, by those that fit.

    An engine fits if its weights, and the KV cache of one sequence of `max_model_len` within
    `mem_fraction_static` of what they leave, fit the free memory of its devices. Refuses "auto" on
    devices that do not report their memory.
    """
    asked = config.parallel
    is_auto = asked.tp_size == "auto"
    by_mesh = dataclasses.replace(asked, tp_size=None) if is_auto else asked
    is_sized = by_mesh.tp_size is not None or asked.data_parallel_size is not None
    if is_sized or mesh is None or mesh.empty:
        return by_mesh
    devices, tensor_dim = share_out(mesh, by_mesh)
    first = 1
    if not is_auto:
        first = devices.shape[tensor_dim]
        check_divides(model, first, asked.expert_parallel_size)
    tried: list[str] = []
    tried_last: ParallelConfig | None = None
    for tp_size in range(first, devices.size + 1):
        if devices.size % tp_size:
            continue
        sized = dataclasses.replace(asked, tp_size=tp_size)
        try:
            needed, free = _needed_and_free(model, config, mesh, dtype, sized, device_bytes)
        except InvalidConfigError as error:
            tried.append(f"tp_size {tp_size}: {error}")
            continue
        if free is None:
            if is_auto:
                raise InvalidConfigError(
                    "tp_size 'auto' needs devices that report their memory; give a number"
                )
            return asked
        if needed <= free:
            return sized if is_auto or tp_size != first else asked
        tried.append(f"tp_size {tp_size} needs {needed} of {free} free bytes")
        tried_last = sized
    if not is_auto:
        return asked  # `plan_memory` says what does not fit
    message = f"tp_size 'auto' finds no size that fits {devices.size} devices: {'; '.join(tried)}"
    if tried_last is None:
        raise InvalidConfigError(message)
    raise NoSizeFits(message, tried_last)


def _needed_and_free(
    model: ModelConfig,
    config: EngineConfig,
    mesh: jax.sharding.Mesh,
    dtype: str,
    parallel: ParallelConfig,
    device_bytes: int | None,
) -> tuple[int, int | None]:
    """Bytes that an engine needs at least, and those that are free on its devices."""
    group = place(model, mesh, dtype, parallel, config.runtime)
    engine = group.engines[0]
    runtime = config.runtime
    kernels = pick_kernels(runtime.linear_backend, engine.target).kernels
    attention = engine_attention(
        runtime.attention_backend,
        engine.target,
        model.head_dims,
        kernels,
        has_values=model.attention.has_values,
        kv_cache_dtype=runtime.kv_cache_dtype,
    )
    tokens = config.max_model_len or model.context_length
    per_token = sum(bytes_per_token(model, config, engine, attention.heads_per_row))
    kv = math.ceil(tokens * per_token / config.cache.mem_fraction_static)
    free = engine_free_bytes(engine, len(group.engines), device_bytes)
    return expected_weights_bytes(model, engine) + kv, free
