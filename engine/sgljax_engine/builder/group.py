"""Puts the parts of a group of engines together from its configuration."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import jax

from sgljax_engine.builder.adapters import adapter_slots, first_adapters
from sgljax_engine.builder.compilation_cache import enable_compilation_cache
from sgljax_engine.builder.endable_progress import EndableProgress
from sgljax_engine.builder.parts import EngineParts, build_runner, plan_parts
from sgljax_engine.cache.allocator import PageAllocator
from sgljax_engine.cache.pool import PagePool
from sgljax_engine.cache.states import StateSlots
from sgljax_engine.cache.window import WindowPages
from sgljax_engine.cache.zeros import shape_of_zeros, zeros
from sgljax_engine.config import TOKEN_BLOCK, EngineConfig, SpeculationConfig
from sgljax_engine.core.calls import RequestGroups, Router
from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.core.group import BuiltGroup, EngineGroup
from sgljax_engine.errors import InvalidConfigError
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models.registry import get_model
from sgljax_engine.observability.metrics import MemoryReport
from sgljax_engine.observability.progress import reporting
from sgljax_engine.placement.shardings import Placement
from sgljax_engine.placement.submeshes import describe, place
from sgljax_engine.processing.input_processor import Limits
from sgljax_engine.processing.tokenizer import Tokenizer
from sgljax_engine.runner.batches.batch import (
    prefill_sizes,
)
from sgljax_engine.runner.kv.parallel_fit import fit_parallel
from sgljax_engine.runner.runner import ModelRunner
from sgljax_engine.runner.serving_weights import AdapterRegistry
from sgljax_engine.runner.warmup import Warmup
from sgljax_engine.scheduler.lengths import AnswerLengths
from sgljax_engine.scheduler.scheduler import Scheduler
from sgljax_engine.scheduler.speculator import Speculator
from sgljax_engine.speculation.drafters import Drafter, HistoryDrafter, SiblingDrafter
from sgljax_engine.weights.adapters import AdapterSlots, slot_shapes
from sgljax_engine.weights.apply import apply
from sgljax_engine.weights.plan import WeightPlanner
from sgljax_engine.weights.rules import WeightSource
from sgljax_engine.weights.served import ServedSource

logger = logging.getLogger(__name__)

_names = itertools.count()


def start_on_clean_thread(
    build: Callable[[], tuple[BuiltGroup, Limits]], progress: EndableProgress
) -> tuple[EngineGroup, Limits]:
    """Builds and starts on a thread of its own, free of the caller's thread-local JAX contexts.

    A mesh or a transfer guard that the caller has set (as Tunix does while it syncs weights) would
    otherwise apply to the engine's own arrays. An interrupt ends the building by `progress`.
    """
    future: Future[tuple[EngineGroup, Limits]] = Future()
    thread = threading.Thread(
        target=_build_and_start, args=(build, future), name="sgljax-engine-builder"
    )
    try:
        thread.start()
        return future.result()
    except BaseException:  # an interrupt: what gets built all the same must not live on
        progress.end("the caller who made the engine was interrupted")
        future.add_done_callback(_stop_if_started)
        raise
    finally:
        if thread.ident is not None:  # else the interrupt came before the thread
            thread.join()


def _build_and_start(
    build: Callable[[], tuple[BuiltGroup, Limits]], future: Future[tuple[EngineGroup, Limits]]
) -> None:
    try:
        future.set_result(_start(*build()))
    except BaseException as error:
        future.set_exception(error)
    del future  # else an error and its traceback, which has this frame, would keep each other


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
    progress: EndableProgress,
) -> tuple[BuiltGroup, Limits]:
    max_model_len = pick_max_model_len(model, config)
    check_options(model, config)
    enable_compilation_cache(config.runtime.compilation_cache_dir)
    parallel = fit_parallel(model, config, mesh, dtype)
    placement = place(model, mesh, dtype, parallel, config.runtime)
    logger.info(describe(placement, mesh, parallel))
    count = len(placement.engines)
    config = config.per_engine(count)
    specs = get_model(model.architecture).param_specs(model)
    planner = WeightPlanner(placement.whole.weight_targets(specs))
    slots = [adapter_slots(config.lora, specs, each) for each in placement.engines]
    served = ServedSource()
    with reporting(progress, "place weights", len(planner.targets), "tensor") as advance:
        plan, arrays = planner.plan(
            weights.arrays, weights.rules, check_finite=config.runtime.check_finite
        )
        made = placement.split(apply(plan, arrays))
        served.remember(plan, arrays)
        del arrays
        for each, room in zip(made, slots, strict=True):
            if room is not None:
                each |= first_adapters(adapters, room, planner.targets)
        advance(len(planner.targets))
    parts = plan_parts(model, config, max_model_len, placement.engines[0], made[0], slots[0], count)
    page_size = config.cache.page_size
    groups = RequestGroups()
    drafters, lengths = _make_drafters(config.speculation), AnswerLengths()
    cores = [
        _build_core(
            config, parts, engine, own, room, adapters, tokenizer, groups, drafters, lengths, index
        )
        for index, (engine, own, room) in enumerate(
            zip(placement.engines, made, slots, strict=True)
        )
    ]
    for core in cores:
        core.runner.programs.progress = progress.listener  # a request's program is not given up
    built = BuiltGroup(
        cores=cores,
        groups=groups,
        router=Router(count, page_size, config.scheduler.max_running_requests),
        planner=planner,
        split=placement.split,
        served=served,
        slots=None if slots[0] is None else [room for room in slots if room is not None],
    )
    return built, Limits(max_model_len, parts.num_pages * page_size)


def build_shapes(
    model: ModelConfig,
    config: EngineConfig,
    dtype: str,
    mesh: jax.sharding.Mesh | None,
    device_bytes: int | None = None,
) -> tuple[ModelRunner, MemoryReport]:
    """One engine of a group without its arrays, whose programs can be lowered but not run.

    Its devices may be those of `jax.experimental.topologies`, which nobody has; `device_bytes` is
    then the memory of one with nothing in it.
    """
    max_model_len = pick_max_model_len(model, config)
    check_options(model, config)
    parallel = fit_parallel(model, config, mesh, dtype, device_bytes)
    placement = place(model, mesh, dtype, parallel, config.runtime)
    count, engine = len(placement.engines), placement.engines[0]
    config = config.per_engine(count)
    specs = get_model(model.architecture).param_specs(model)
    weights = {name: target.stored for name, target in engine.weight_targets(specs).items()}
    slots = adapter_slots(config.lora, specs, engine)
    if slots is not None:
        weights |= slot_shapes(slots)
    parts = plan_parts(
        model,
        config,
        max_model_len,
        engine,
        weights,
        slots,
        count,
        are_loaded=False,
        device_bytes=device_bytes,
    )
    # Lowered for its devices, since JAX compiles what has none for those of this process only.
    parts = parts._replace(lowerings=None)
    return build_runner(parts, engine, weights, slots, shape_of_zeros), parts.memory.report


def pick_max_model_len(model: ModelConfig, config: EngineConfig) -> int:
    asked = config.max_model_len
    if asked is not None and asked > model.context_length:
        raise InvalidConfigError(
            f"max_model_len must be at most the model's context length {model.context_length}, "
            f"got {asked}"
        )
    return asked or model.context_length


def check_options(model: ModelConfig, config: EngineConfig) -> None:
    """Raises InvalidConfigError for options that a model cannot have.

    Those are experts to return, where it has none, and experts or latents to quantise.
    """
    kv_dtype = config.runtime.kv_cache_dtype
    if kv_dtype != "auto" and not model.attention.has_values:
        raise InvalidConfigError(
            f"kv_cache_dtype must be 'auto' for a model with latents ({model.architecture}), got "
            f"{kv_dtype!r}"
        )
    if config.runtime.quantization is not None and model.moe is not None:
        raise InvalidConfigError(
            f"quantization must be None for a model with experts ({model.architecture}), got "
            f"{config.runtime.quantization!r}"
        )
    if config.cache.enable_return_routed_experts and model.moe is None:
        raise InvalidConfigError(
            "enable_return_routed_experts must be False for a model without experts "
            f"({model.architecture}), got True"
        )


def _build_core(
    config: EngineConfig,
    parts: EngineParts,
    placement: Placement,
    weights: Mapping[str, jax.Array],
    slots: AdapterSlots | None,
    adapters: Mapping[str, WeightSource],
    tokenizer: Tokenizer | None,
    groups: RequestGroups,
    drafters: Mapping[str, Drafter],
    lengths: AnswerLengths,
    index: int,
) -> EngineCore:
    speculator = _make_speculator(config.speculation, drafters, parts)
    runner = build_runner(parts, placement, weights, slots, zeros)
    page_size, windows = config.cache.page_size, None
    if parts.memory.windows is not None:
        windows = WindowPages(parts.num_pages, parts.memory.windows, page_size)
    num_slots = parts.memory.report.state_slots
    states = StateSlots(num_slots) if num_slots else None
    beside = windows or states
    pool = PagePool(
        PageAllocator(parts.num_pages, None if beside is None else beside.forget),
        page_size,
        is_sharing=not config.cache.disable_radix_cache,
        windows=windows,
        states=states,
    )
    scheduler = Scheduler(
        config.scheduler,
        pool,
        token_block=TOKEN_BLOCK,
        max_prefill_tokens=config.max_prefill_tokens,
        prefill_sizes=prefill_sizes(parts.shapes.token_buckets, parts.static.prefill_pass),
        speculator=speculator,
        lengths=lengths,
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
        index=index,
        speculator=speculator,
    )


def _make_drafters(config: SpeculationConfig) -> dict[str, Drafter]:
    drafters: dict[str, Drafter] = {}
    if config.speculation != "off":
        if "history" in config.speculative_drafters:
            drafters["history"] = HistoryDrafter(config.speculative_history_bytes)
        if "siblings" in config.speculative_drafters:
            drafters["siblings"] = SiblingDrafter()
    return drafters


def _make_speculator(
    config: SpeculationConfig, drafters: Mapping[str, Drafter], parts: EngineParts
) -> Speculator | None:
    sizes = {size: parts.static.row_tokens(size) for size in parts.shapes.batch_buckets}
    sizes = {size: row_tokens for size, row_tokens in sizes.items() if len(row_tokens) > 1}
    return Speculator(config, drafters, sizes) if sizes else None
