"""Parts that the engines of a group share: sizes, and contexts of their programs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import sgljax_cpu
from sgljax_engine.builder.backends import engine_backends
from sgljax_engine.builder.program_memory import program_bytes
from sgljax_engine.cache.window import NUM_NULL
from sgljax_engine.cache.zeros import MakeZeros, shape_of_zeros
from sgljax_engine.config import TOKEN_BLOCK, EngineConfig
from sgljax_engine.layers.kernels import CpuKernels
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models.registry import get_model
from sgljax_engine.models.spec import ModelContext, ModelDefinition
from sgljax_engine.observability.metrics import MemoryReport
from sgljax_engine.placement.shardings import Placement
from sgljax_engine.runner.batches.drafts import TextSizes
from sgljax_engine.runner.compile.compiled import Lowerings
from sgljax_engine.runner.compile.shapes import (
    BatchShapes,
    default_batch_buckets,
    default_token_buckets,
    max_step_tokens,
    prefill_pass,
)
from sgljax_engine.runner.kv.memory_plan import MemoryPlan, plan_memory
from sgljax_engine.runner.programs.context import DraftContext, ProgramContext
from sgljax_engine.runner.programs.drafts import search_text
from sgljax_engine.runner.runner import ModelRunner
from sgljax_engine.sampling.native import NATIVE
from sgljax_engine.sampling.sampler import XLA
from sgljax_engine.weights.adapters import AdapterSlots


class EngineParts(NamedTuple):
    """What the engines of a group have in common; `memory` is that of one engine."""

    static: ProgramContext
    memory: MemoryPlan
    shapes: BatchShapes
    lowerings: Lowerings | None

    @property
    def num_pages(self) -> int:
        return self.memory.report.kv_tokens // self.static.page_size


def plan_parts(
    model: ModelConfig,
    config: EngineConfig,
    max_model_len: int,
    placement: Placement,
    weights: Mapping[str, Any],
    slots: AdapterSlots | None,
    num_engines: int,
    *,
    are_loaded: bool = True,
    device_bytes: int | None = None,
) -> EngineParts:
    """Plans one engine; of several on equal devices, for all.

    `config` is that of one engine; `weights` are its arrays, or their shapes.
    """
    page_size = config.cache.page_size
    definition = get_model(model.architecture)
    static = _program_context(config, definition, model, placement, slots)
    plan = functools.partial(
        plan_memory,
        model,
        config,
        placement,
        max_model_len,
        placement.held_bytes(weights.values()),
        heads_per_row=static.attention.heads_per_row,
        num_engines=num_engines,
        are_loaded=are_loaded,
        device_bytes=device_bytes,
    )
    batch_buckets, token_buckets = _buckets(config, placement.platform, static.prefill_pass)
    table_width = -(-max_model_len // page_size)
    texts = TextSizes.of(max_model_len, static.max_row_tokens) if static.drafts.num_drafts else None
    shapes = BatchShapes(batch_buckets, token_buckets, TOKEN_BLOCK, table_width, texts)
    parts = _parts(static, plan(), shapes, Lowerings.for_engines(num_engines))
    is_accelerator = device_bytes is not None or not placement.is_own_cpu
    if not is_accelerator or _is_roomy(parts.memory.report):
        return parts
    probe = build_runner(parts._replace(lowerings=None), placement, weights, slots, shape_of_zeros)
    facts = {
        "model": dataclasses.asdict(model),
        "config": dataclasses.asdict(config),
        "dtype": placement.dtype.name,
        "mesh": dict(placement.mesh.shape),
        "device": placement.mesh.devices.flat[0].device_kind,
        "kv_tokens": parts.memory.report.kv_tokens,
        "state_slots": parts.memory.report.state_slots,
    }
    needed = program_bytes(probe, facts, config.runtime.compilation_cache_dir)
    if needed is None:  # what does not fit is said by whoever compiles it
        return parts
    memory = plan(program_bytes=needed * placement.num_tensor_shards)
    return _parts(static, memory, shapes, parts.lowerings)


def _parts(
    static: ProgramContext, memory: MemoryPlan, shapes: BatchShapes, lowerings: Lowerings | None
) -> EngineParts:
    static = static._replace(has_windows=memory.windows is not None)
    return EngineParts(static, memory, shapes, lowerings)


def _is_roomy(memory: MemoryReport) -> bool:
    """Whether pages leave programs so much memory that their compiler need not be asked."""
    return memory.free_bytes is None or memory.kv_bytes <= memory.free_bytes // 2


def build_runner(
    parts: EngineParts,
    placement: Placement,
    weights: Mapping[str, Any],
    slots: AdapterSlots | None,
    make_zeros: MakeZeros,
) -> ModelRunner:
    """`weights` are arrays or their shapes; `make_zeros` makes the KV cache likewise."""
    windows = parts.memory.windows
    return ModelRunner(
        static=parts.static,
        placement=placement,
        weights=weights,
        num_pages=parts.num_pages,
        shapes=parts.shapes,
        num_window_pages=0 if windows is None else windows.num_pages + NUM_NULL,
        num_state_slots=parts.memory.report.state_slots,
        slots=slots,
        lowerings=parts.lowerings,
        make_zeros=make_zeros,
    )


def _program_context(
    config: EngineConfig,
    definition: ModelDefinition,
    model: ModelConfig,
    placement: Placement,
    slots: AdapterSlots | None,
) -> ProgramContext:
    backends = engine_backends(config, model, placement.target)
    kernels, attention = backends
    if backends.is_native:
        kernels = CpuKernels(_partial_outputs(definition, model, placement, slots))
    drafts = config.speculation
    return ProgramContext(
        model=definition,
        context=ModelContext(
            model,
            kernels=kernels,
            takes_projections=attention.takes_projections,
            dtype=placement.dtype,
            lora_rank=config.lora.max_lora_rank if config.lora.max_loras else 0,
            returns_routed=config.cache.enable_return_routed_experts,
            expert_parallel_size=placement.expert_parallel_size,
        ),
        attention=attention,
        page_size=config.cache.page_size,
        page_layouts=placement.page_layouts(model, attention.heads_per_row),
        max_steps=config.scheduler.decode_steps,
        prefill_pass=prefill_pass(placement.platform),
        sampler=NATIVE if backends.is_native else XLA,
        num_vocab_shards=placement.num_tensor_shards,
        drafts=DraftContext(
            drafts.speculative_num_draft_tokens if drafts.speculation != "off" else 0,
            max_step_tokens(placement.platform),
            sgljax_cpu.longest_match if backends.is_native else search_text,
        ),
    )


def _partial_outputs(
    definition: ModelDefinition,
    model: ModelConfig,
    placement: Placement,
    slots: AdapterSlots | None,
) -> tuple[tuple[str, int], ...]:
    """Outputs of the weights whose last panel is partly filled, by name."""
    targets = placement.weight_targets(definition.param_specs(model))
    if slots is not None:
        targets |= slots.specs()
    outputs = {name: target.num_outputs for name, target in targets.items()}
    return tuple(
        (name, count) for name, count in outputs.items() if count and count % sgljax_cpu.PANEL
    )


def _buckets(
    config: EngineConfig, platform: str, per_pass: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    runtime = config.runtime
    max_running, max_tokens = config.scheduler.max_running_requests, config.max_prefill_tokens
    return (
        runtime.batch_buckets or default_batch_buckets(max_running, platform),
        runtime.token_buckets or default_token_buckets(max_tokens, per_pass),
    )
