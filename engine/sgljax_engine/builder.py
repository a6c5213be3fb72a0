"""Puts an engine's parts together from its configuration."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax

from sgljax_engine.attention.base import AttentionBackend
from sgljax_engine.attention.registry import pick_attention
from sgljax_engine.cache.allocator import PageAllocator
from sgljax_engine.cache.pool import PagePool
from sgljax_engine.checks import require
from sgljax_engine.config import LORA_TARGETS, TOKEN_BLOCK, EngineConfig, LoraConfig
from sgljax_engine.core.adapters import AdapterRegistry
from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.core.group import BuiltGroup, EngineGroup
from sgljax_engine.core.request_groups import RequestGroups
from sgljax_engine.core.router import Router
from sgljax_engine.core.weight_updates import WeightSource
from sgljax_engine.errors import EngineError, InvalidConfigError, WeightLoadError
from sgljax_engine.layers.projections import pick_projections
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models.registry import get_model, load_model_config
from sgljax_engine.models.spec import ModelContext, ModelDefinition, ParamKind, ParamSpec
from sgljax_engine.models.weight_rules import hf_rules, logical_rules
from sgljax_engine.observability.progress import ProgressListener, reporting
from sgljax_engine.placement.shardings import Placement
from sgljax_engine.placement.submeshes import describe, place
from sgljax_engine.processing.input_processor import Limits
from sgljax_engine.processing.tokenizer import Tokenizer
from sgljax_engine.runner.batch import (
    default_batch_buckets,
    default_token_buckets,
    prefill_pass,
    prefill_sizes,
)
from sgljax_engine.runner.compiled import Lowerings
from sgljax_engine.runner.memory_plan import MemoryPlan, fit_parallel, plan_memory
from sgljax_engine.runner.programs import ProgramContext
from sgljax_engine.runner.runner import ModelRunner
from sgljax_engine.runner.shapes import BatchShapes
from sgljax_engine.runner.warmup import Warmup
from sgljax_engine.runner.widths import agreeing_widths
from sgljax_engine.scheduler.scheduler import Scheduler
from sgljax_engine.weights import loader, sync
from sgljax_engine.weights.adapters import (
    A_SUFFIX,
    B_SUFFIX,
    AdapterSlots,
    empty_slots,
    plan_adapter,
)
from sgljax_engine.weights.hf_json import read_json
from sgljax_engine.weights.rules import WeightRule, check_rules
from sgljax_engine.weights.served import ServedSource
from sgljax_engine.weights.sync import TargetSpec

LOAD_FORMATS = ("auto", "safetensors", "dummy")

_WITH_SLOTS = (ParamKind.LINEAR, ParamKind.EMBEDDING)

_FILLS = {ParamKind.NORM: 1.0, ParamKind.OFFSET_NORM: 0.0, ParamKind.BIAS: 0.0}
"""What vectors are in a model of random weights."""

_JAX_MIN_COMPILE_S, _MIN_COMPILE_S = 1.0, 0.1
"""Seconds of compilation from which on a program is worth a file: JAX's default, and ours.

Most of an engine's programs compile in less than JAX's."""

logger = logging.getLogger(__name__)

_names = itertools.count()


def check_sources(
    model_path: str | Path | None,
    model_config: ModelConfig | None,
    weights: Any,
    weight_rules: Sequence[WeightRule] | None,
    load_format: str,
) -> None:
    """Refuses arguments that contradict one another; none is ever ignored."""
    if (model_path is None) == (model_config is None):
        raise InvalidConfigError("give exactly one of model_path and model_config")
    _check_types(model_path, model_config, weights)
    if load_format not in LOAD_FORMATS:
        raise InvalidConfigError(f"load_format must be one of {LOAD_FORMATS}, got {load_format!r}")
    if weights is not None and load_format != "auto":
        raise InvalidConfigError(f"load_format={load_format!r} goes without weights")
    if weights is None and weight_rules is not None:
        raise InvalidConfigError("weight_rules goes with weights")
    if load_format == "safetensors" and model_path is None:
        raise InvalidConfigError("load_format='safetensors' needs model_path")


def _check_types(
    model_path: str | Path | None, model_config: ModelConfig | None, weights: Any
) -> None:
    if isinstance(weights, (str, os.PathLike)):
        raise InvalidConfigError(
            f"weights must be arrays, got {str(weights)!r}; a folder goes into model_path"
        )
    if model_config is not None:
        kind = type(model_config).__name__
        expected = "a ModelConfig (model_config_from_hf makes one of a config.json's contents)"
        require(isinstance(model_config, ModelConfig), "model_config", kind, expected)
        return
    assert model_path is not None
    folder = Path(model_path)
    if not folder.exists():
        raise InvalidConfigError(
            f"model_path must be a folder, and there is no {str(folder)!r}; models are not "
            "downloaded"
        )
    require(folder.is_dir(), "model_path", str(folder), "a folder")


def folder_weights(
    model: ModelConfig, folder: str | Path, progress: ProgressListener | None = None
) -> WeightSource:
    """The weights of a Hugging Face folder, still on the host."""
    with reporting(progress, "read weights", loader.folder_bytes(folder), "B") as advance:
        return WeightSource(loader.read_hf_folder(folder, advance), hf_rules(model))


def same_model_weights(
    model: ModelConfig, folder: str | Path, rules: Sequence[WeightRule] | None
) -> WeightSource:
    """`folder_weights` of a folder that must describe the same model.

    Raises:
        WeightLoadError: for a folder that is not there, has no config.json, or one that differs in
            more than its end-of-sequence ids and context length.
    """
    if not Path(folder).is_dir():
        if Path(folder).exists():
            raise WeightLoadError(f"weights must be arrays or a folder, got the file {folder}")
        raise WeightLoadError(f"no such folder of weights: {str(folder)!r}")
    if not (Path(folder) / "config.json").exists():
        raise WeightLoadError(
            f"{folder} has no config.json, so nothing tells whether it is of the same model; give "
            "arrays instead, safetensors.numpy.load_file reads them"
        )
    try:
        found = load_model_config(folder)
    except EngineError as error:
        raise WeightLoadError(f"{folder}: {error}") from error
    differing = [
        f"{field.name} {getattr(found, field.name)!r}, not {getattr(model, field.name)!r}"
        for field in dataclasses.fields(model)
        if field.name not in ("eos_token_ids", "context_length")
        and getattr(found, field.name) != getattr(model, field.name)
    ]
    if differing:
        raise WeightLoadError(f"{folder} holds another model: {'; '.join(differing)}")
    source = folder_weights(model, folder)
    return source if rules is None else source._replace(rules=check_rules(rules))


def dummy_weights(model: ModelConfig, seed: int) -> WeightSource:
    """Random weights."""
    specs = get_model(model.architecture).param_specs(model)
    shapes = {name: spec.shape for name, spec in specs.items()}
    fills = {name: _FILLS[spec.kind] for name, spec in specs.items() if spec.kind in _FILLS}
    return WeightSource(loader.random_weights(shapes, fills, seed), logical_rules(model))


def adapter_slots(
    lora: LoraConfig, specs: Mapping[str, ParamSpec], placement: Placement
) -> AdapterSlots | None:
    """The room for adapters beside a model's projections; None without."""
    if not lora.max_loras:
        return None
    kinds = LORA_TARGETS[:-1] if lora.lora_targets is None else lora.lora_targets
    size = lora.max_loras * lora.max_lora_rank
    wanted: dict[str, ParamSpec] = {}
    names = []
    for name, spec in specs.items():
        projection = name.removesuffix(".weight")
        if projection.rsplit(".", 1)[-1] not in kinds or spec.kind not in _WITH_SLOTS:
            continue
        # The output projection is [vocab, model], all others [in, out].
        is_head = spec.kind is ParamKind.EMBEDDING
        num_in, num_out = spec.shape[::-1] if is_head else spec.shape
        in_axis, out_axis = spec.axes[::-1] if is_head else spec.axes
        names.append(projection)
        for suffix, shape, axes in (
            (A_SUFFIX, (num_in, size), (in_axis, None)),
            (B_SUFFIX, (size, num_out), (None, out_axis)),
        ):
            wanted[projection + suffix] = ParamSpec(shape, ParamKind.LINEAR, axes, "")
    if not names:
        raise InvalidConfigError(f"lora_targets {kinds} are no projections of this model")
    targets = placement.weight_targets(wanted)
    return AdapterSlots(
        lora.max_loras,
        lora.max_lora_rank,
        tuple((name, targets[name + A_SUFFIX], targets[name + B_SUFFIX]) for name in names),
    )


def first_adapters(
    adapters: Mapping[str, WeightSource], slots: AdapterSlots, targets: Mapping[str, TargetSpec]
) -> dict[str, jax.Array]:
    """The slots with the adapters that an engine starts with, in their order."""
    made = empty_slots(slots)
    for slot, source in enumerate(adapters.values()):
        plan, arrays = plan_adapter(source.arrays, source.rules, slots, targets)
        made = plan.build(arrays, made, slot)
    return made


def check_adapters(adapters: Mapping[str, Any], lora: LoraConfig) -> None:
    """Refuses more adapters than there are slots, and names that are none."""
    if len(adapters) > lora.max_loras:
        raise InvalidConfigError(
            f"adapters holds {len(adapters)}, but max_loras is {lora.max_loras}"
        )
    for name in adapters:
        if not isinstance(name, str) or not name:
            raise InvalidConfigError(f"adapters must have names, got {name!r}")


def pick_dtype(config: EngineConfig, folder: str | Path | None) -> str:
    """The dtype asked for, else the one that the folder's config.json names, else float32."""
    if config.runtime.dtype is not None:
        return config.runtime.dtype
    if folder is None:
        return "float32"
    named = read_json(Path(folder) / "config.json")
    return str(named.get("dtype") or named.get("torch_dtype") or "float32")


def pick_weights(
    model: ModelConfig,
    config: EngineConfig,
    folder: str | Path | None,
    weights: Any,
    rules: Sequence[WeightRule] | None,
    load_format: str,
    progress: ProgressListener | None,
) -> WeightSource:
    """The first weights: given ones, random ones, or the folder's."""
    if weights is not None:
        return WeightSource(weights, hf_rules(model) if rules is None else check_rules(rules))
    if load_format == "dummy" or folder is None:
        return dummy_weights(model, config.runtime.random_seed or 0)
    return folder_weights(model, folder, progress)


def start_on_clean_thread(
    build: Callable[[], tuple[BuiltGroup, Limits]],
) -> tuple[EngineGroup, Limits]:
    """Builds and starts on a thread of its own, free of the caller's thread-local JAX contexts.

    A mesh or a transfer guard that the caller has set (as Tunix does while it syncs weights)
    would otherwise apply to the engine's own arrays.
    """
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: _start(*build()))
        try:
            return future.result()
        except BaseException:  # an interrupt: what gets built all the same must not live on
            future.add_done_callback(_stop_if_started)
            raise


def _start(built: BuiltGroup, limits: Limits) -> tuple[EngineGroup, Limits]:
    return EngineGroup(built, f"sgljax-engine-{next(_names)}"), limits


def _stop_if_started(future: Future[tuple[EngineGroup, Limits]]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result()[0].request_stop()


def build_group(
    *,
    model: ModelConfig,
    config: EngineConfig,
    dtype: str,
    weights: WeightSource,
    adapters: Mapping[str, WeightSource],
    tokenizer: Tokenizer | None,
    mesh: jax.sharding.Mesh | None,
    progress: ProgressListener | None,
) -> tuple[BuiltGroup, Limits]:
    """Checks the configuration, takes memory, transforms the weights."""
    max_model_len = pick_max_model_len(model, config)
    enable_compilation_cache(config.runtime.compilation_cache_dir)
    parallel = fit_parallel(model, config, mesh, dtype)
    placement = place(model, mesh, dtype, parallel)
    logger.info(describe(placement, mesh, parallel))
    count = len(placement.engines)
    config = config.per_engine(count)
    specs = get_model(model.architecture).param_specs(model)
    maker = sync.WeightMaker(placement.whole.weight_targets(specs))
    slots = [adapter_slots(config.lora, specs, each) for each in placement.engines]
    served = ServedSource()
    with reporting(progress, "place weights", len(maker.targets), "tensor") as advance:
        plan, arrays = maker.plan(
            weights.arrays, weights.rules, check_finite=config.runtime.check_finite
        )
        made = placement.split(sync.apply(plan, arrays))
        served.remember(plan, arrays)
        del arrays
        for each, room in zip(made, slots, strict=True):
            if room is not None:
                each |= first_adapters(adapters, room, maker.targets)
        advance(len(maker.targets))
    parts = _core_parts(model, config, max_model_len, placement.engines[0], made[0], count)
    page_size = config.cache.page_size
    groups = RequestGroups()
    cores = [
        _build_core(config, parts, engine, own, room, adapters, tokenizer, groups, index)
        for index, (engine, own, room) in enumerate(
            zip(placement.engines, made, slots, strict=True)
        )
    ]
    built = BuiltGroup(
        cores=cores,
        groups=groups,
        router=Router(count, page_size, config.scheduler.max_running_requests),
        weight_maker=maker,
        split=placement.split,
        served=served,
        slots=None if slots[0] is None else [room for room in slots if room is not None],
    )
    return built, Limits(max_model_len, parts.num_pages * page_size)


class _CoreParts(NamedTuple):
    """What the engines of a group have in common.

    Attributes:
        static: What programs are compiled for.
        memory: Of one engine.
        num_pages: Pages of one engine.
        shapes: Sizes of the batches.
        lowerings: Programs of several engines.
    """

    static: ProgramContext
    memory: MemoryPlan
    num_pages: int
    shapes: BatchShapes
    lowerings: Lowerings | None


def _core_parts(
    model: ModelConfig,
    config: EngineConfig,
    max_model_len: int,
    placement: Placement,
    weights: Mapping[str, jax.Array],
    num_engines: int,
) -> _CoreParts:
    page_size = config.cache.page_size
    attention = pick_attention(config.runtime.attention_backend, placement.target, model.head_dim)
    definition = get_model(model.architecture)
    static = _program_context(config, definition, model, placement, weights, attention)
    memory = plan_memory(
        model,
        config,
        placement,
        max_model_len,
        placement.held_bytes(weights.values()),
        contiguous_kv=attention.contiguous_kv,
        num_engines=num_engines,
    )
    batch_buckets, token_buckets = _buckets(config, placement.platform, static.prefill_pass)
    table_width = -(-max_model_len // page_size)
    shapes = BatchShapes(batch_buckets, token_buckets, TOKEN_BLOCK, table_width)
    num_pages = memory.report.kv_tokens // page_size
    lowerings = Lowerings.for_engines(num_engines)
    return _CoreParts(static, memory, num_pages, shapes, lowerings)


def _build_core(
    config: EngineConfig,
    parts: _CoreParts,
    placement: Placement,
    weights: Mapping[str, jax.Array],
    slots: AdapterSlots | None,
    adapters: Mapping[str, WeightSource],
    tokenizer: Tokenizer | None,
    groups: RequestGroups,
    place: int,
) -> EngineCore:
    runner = ModelRunner(
        static=parts.static,
        placement=placement,
        weights=weights,
        num_pages=parts.num_pages,
        shapes=parts.shapes,
        contiguous_shapes=parts.memory.contiguous_shapes,
        slots=slots,
        lowerings=parts.lowerings,
    )
    pool = PagePool(
        PageAllocator(parts.num_pages),
        config.cache.page_size,
        is_sharing=not config.cache.disable_radix_cache,
    )
    scheduler = Scheduler(
        config.scheduler,
        pool,
        token_block=TOKEN_BLOCK,
        max_prefill_tokens=config.max_prefill_tokens,
        prefill_sizes=prefill_sizes(parts.shapes.token_buckets, parts.static.prefill_pass),
    )
    return EngineCore(
        scheduler=scheduler,
        pool=pool,
        runner=runner,
        warmup=Warmup(runner, forbid_compile=config.runtime.forbid_compile),
        adapters=AdapterRegistry(config.lora.max_loras, tuple(adapters)),
        memory=parts.memory.report,
        tokenizer=tokenizer,
        groups=groups,
        place=place,
    )


def _program_context(
    config: EngineConfig,
    definition: ModelDefinition,
    model: ModelConfig,
    placement: Placement,
    weights: Mapping[str, jax.Array],
    attention: AttentionBackend,
) -> ProgramContext:
    runtime = config.runtime
    context = ModelContext(
        model,
        placement.layout,
        projections=pick_projections(runtime.linear_backend, placement.target).projections,
        lora_rank=config.lora.max_lora_rank if config.lora.max_loras else 0,
    )
    if runtime.enable_deterministic_sampling:
        widths = agreeing_widths(definition, context, weights, placement.is_own_cpu)
        context = context._replace(tile_widths=widths)
    return ProgramContext(
        model=definition,
        context=context,
        attention=attention.batch_invariant if context.is_deterministic else attention.attend,
        page_size=config.cache.page_size,
        max_steps=config.scheduler.decode_steps,
        prefill_pass=prefill_pass(placement.platform),
        decode_attention=attention.decode,
    )


def pick_max_model_len(model: ModelConfig, config: EngineConfig) -> int:
    """The length asked for, which the model must have room for, else the model's own."""
    asked = config.max_model_len
    if asked is not None and asked > model.context_length:
        raise InvalidConfigError(
            f"max_model_len must be at most the model's context length {model.context_length}, "
            f"got {asked}"
        )
    return asked or model.context_length


def _buckets(
    config: EngineConfig, platform: str, per_pass: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    runtime = config.runtime
    max_running, max_tokens = config.scheduler.max_running_requests, config.max_prefill_tokens
    return (
        runtime.batch_buckets or default_batch_buckets(max_running, platform),
        runtime.token_buckets or default_token_buckets(max_tokens, per_pass),
    )


def compilation_cache_path(folder: str | None) -> Path | None:
    """Where `enable_compilation_cache` has programs kept; None for nowhere."""
    configured = getattr(jax.config, "jax_compilation_cache_dir", None)
    if folder is None or folder == "auto":
        if configured is not None:
            return Path(configured)
        return None if folder is None else Path.home() / ".cache" / "tunix_sgljax" / "xla"
    return Path(folder)


def enable_compilation_cache(folder: str | None) -> None:
    """Turns on JAX's persistent compilation cache for this process.

    It then keeps what compiles in 0.1 s, of the host process too, unless that has changed JAX's
    limit of 1 s. A cache that the process has configured is left as it is.

    Args:
        folder: Where; "auto" for a folder in the user's cache directory, unless the process has
            configured one; None to do nothing.
    """
    configured = getattr(jax.config, "jax_compilation_cache_dir", None)
    if folder is None or (folder == "auto" and configured is not None):
        return
    path = compilation_cache_path(folder)
    from jax.experimental.compilation_cache import compilation_cache

    # JAX decides once, at the first compilation, whether to use a cache: decide again.
    compilation_cache.reset_cache()
    compilation_cache.set_cache_dir(str(path))
    limit = "jax_persistent_cache_min_compile_time_secs"
    if getattr(jax.config, limit) == _JAX_MIN_COMPILE_S:
        jax.config.update(limit, _MIN_COMPILE_S)
