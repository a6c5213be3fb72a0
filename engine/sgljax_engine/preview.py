from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import jax

from sgljax_engine.attention.cpu import native_problem
from sgljax_engine.builder.backends import engine_backends
from sgljax_engine.builder.compilation_cache import compilation_cache_path
from sgljax_engine.builder.group import check_options, pick_max_model_len
from sgljax_engine.builder.sources import pick_dtype
from sgljax_engine.config import EngineConfig
from sgljax_engine.errors import InvalidConfigError
from sgljax_engine.layers.kernels import pick_kernels
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models.registry import get_model
from sgljax_engine.observability.metrics import MemoryReport
from sgljax_engine.placement.submeshes import place
from sgljax_engine.runner.kv.memory_plan import (
    engine_free_bytes,
    expected_weights_bytes,
    plan_memory,
)
from sgljax_engine.runner.kv.parallel_fit import NoSizeFits, fit_parallel


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnginePreview:
    """The backends, sizes and memory that an engine would use.

    Attributes:
        platform: JAX's name for the kind of device.
        device_kind: The device's own name.
        dtype: Dtype of weights, activations and KV cache.
        attention: Name of the attention backend.
        linear: Backend of projections, see `LINEAR_BACKENDS`.
        why_not_native: Why a CPU does not use JIT-compiled CPU kernels; None if it does.
        max_model_len: Maximum number of prompt plus output tokens of one request.
        num_parameters: Number of parameters in the weights.
        num_engines: Number of engines on the devices: the data-parallel size.
        tp_size: Devices of each engine; the largest number tried if "auto" fits nowhere.
        weights_bytes: Bytes of the weights of one engine, in `dtype`.
        free_bytes: Free bytes of memory for one engine, before the weights; None if the devices do
            not report them.
        memory: Memory that one engine's KV cache would take; None if it would not fit.
        problem: Why it would not fit; None if it would.
        compilation_cache: Folder of compiled programs; None if they are not kept.
    """

    platform: str
    device_kind: str
    dtype: str
    attention: str
    linear: str
    why_not_native: str | None
    max_model_len: int
    num_parameters: int
    num_engines: int
    tp_size: int
    weights_bytes: int
    free_bytes: int | None
    memory: MemoryReport | None
    problem: str | None
    compilation_cache: Path | None


def preview_engine(
    model: ModelConfig,
    *,
    folder: str | Path | None = None,
    mesh: jax.sharding.Mesh | None = None,
    config: EngineConfig | None = None,
    device_bytes: int | None = None,
) -> EnginePreview:
    """Says what an engine for a model would use.

    Args:
        model: The model's shape.
        folder: The model's Hugging Face folder, whose config.json may name the dtype.
        mesh: As for `Engine`.
        config: As for `Engine`.
        device_bytes: Memory of one empty device, for devices that are not there. None asks the
            devices.

    Raises:
        InvalidConfigError: names an option that the engine would refuse.
        UnsupportedModelError: for an architecture that is not implemented.
    """
    config = config or EngineConfig()
    dtype = pick_dtype(config, folder)
    problem = None
    check_options(model, config)
    try:
        parallel = fit_parallel(model, config, mesh, dtype, device_bytes)
    except NoSizeFits as error:
        parallel, problem = error.tried_last, str(error)
    group = place(model, mesh, dtype, parallel, config.runtime)
    num_engines = len(group.engines)
    config, placement = config.per_engine(num_engines), group.engines[0]
    specs = get_model(model.architecture).param_specs(model)
    num_parameters = sum(math.prod(spec.shape) for spec in specs.values())
    held = expected_weights_bytes(model, placement)
    max_model_len = pick_max_model_len(model, config)
    free = engine_free_bytes(placement, num_engines, device_bytes)
    runtime, target = config.runtime, placement.target
    linear = pick_kernels(runtime.linear_backend, target)
    attention = engine_backends(config, model, target).attention
    plan = None
    try:
        if problem is None:
            plan = plan_memory(
                model,
                config,
                placement,
                max_model_len,
                held,
                heads_per_row=attention.heads_per_row,
                num_engines=num_engines,
                are_loaded=False,
                device_bytes=device_bytes,
            )
    except InvalidConfigError as error:
        problem = str(error)
    why_not_native = linear.why_not_native
    if (
        placement.platform == "cpu"
        and attention.name == "xla"
        and runtime.attention_backend == "auto"
    ):
        why_not_native = why_not_native or native_problem(target, model.head_dims)
    return EnginePreview(
        platform=placement.platform,
        device_kind=placement.mesh.devices.flat[0].device_kind,
        dtype=placement.dtype.name,
        attention=attention.name,
        linear=linear.name,
        why_not_native=why_not_native,
        max_model_len=max_model_len,
        num_parameters=num_parameters,
        num_engines=num_engines,
        tp_size=placement.mesh.size,
        weights_bytes=held,
        free_bytes=free,
        memory=None if plan is None else plan.report,
        problem=problem,
        compilation_cache=compilation_cache_path(config.runtime.compilation_cache_dir),
    )
