"""Owns the weights and dispatches the compiled programs. Engine thread only."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from sgljax_engine.cache.zeros import MakeZeros, zeros
from sgljax_engine.errors import (
    EngineError,
    EngineStepError,
    NonFiniteLogitsError,
    forget_locals,
)
from sgljax_engine.kernels.runs import MIN_SHARED_KEYS
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.placement.shardings import Placement
from sgljax_engine.runner.batches.batch import (
    build_decode_batch,
    build_prefill_batches,
    decode_order,
    rows_above_smaller_bucket,
)
from sgljax_engine.runner.batches.drafts import build_draft_batch
from sgljax_engine.runner.batches.page_ids import build_copies, build_state_copies
from sgljax_engine.runner.batches.sampling import (
    build_allowed_batch,
    build_logprob_batch,
    build_mask_batch,
    build_sampling_batch,
    build_table,
)
from sgljax_engine.runner.compile.compiled import Lowerings, ProgramCache, ProgramCall
from sgljax_engine.runner.compile.shapes import BatchShapes
from sgljax_engine.runner.kv.host_arrays import (
    HostArray,
    HostMemory,
    host_memory,
    to_device,
    to_host,
)
from sgljax_engine.runner.kv.kv_memory import KVMemory
from sgljax_engine.runner.kv.routed_reader import RoutedReader
from sgljax_engine.runner.programs.context import ProgramContext
from sgljax_engine.runner.programs.decode import RowOptions
from sgljax_engine.runner.results import PendingDecode, PendingStep
from sgljax_engine.runner.scorer import Scorer
from sgljax_engine.types import (
    PageCopy,
    PrefillChunk,
    PromptLogprobs,
    Request,
    SchedulerOutput,
    StateCopy,
)
from sgljax_engine.weights.adapters import AdapterSlots, empty_slots
from sgljax_engine.weights.checks import checksums, differing
from sgljax_engine.weights.plan import WeightPlanner
from sgljax_engine.weights.rules import WeightRule
from sgljax_engine.weights.specs import TargetSpec

logger = logging.getLogger(__name__)


class ModelRunner:
    """Turns chunks and rows into device programs. Any thread may read `weight_version`.

    Weights are physical arrays by name, adapter slots among them, or shapes where programs are only
    compiled.
    """

    def __init__(
        self,
        *,
        static: ProgramContext,
        placement: Placement,
        weights: Mapping[str, Any],
        num_pages: int,
        num_window_pages: int = 0,
        num_state_slots: int = 0,
        shapes: BatchShapes,
        slots: AdapterSlots | None = None,
        lowerings: Lowerings | None = None,
        make_zeros: MakeZeros = zeros,
    ) -> None:
        self._slots = slots
        self._static = static
        self._placement = placement
        self._host_memory: HostMemory = host_memory(placement.mesh.devices.flat[0])
        self.shapes = shapes
        self.weights: dict[str, jax.Array] = dict(weights)
        self.weight_version = 0
        self.programs = ProgramCache(static, placement, lowerings)
        self.kv_memory = KVMemory(
            self.programs,
            static=static,
            placement=placement,
            num_pages=num_pages,
            num_window_pages=num_window_pages,
            num_state_slots=num_state_slots,
            make_zeros=make_zeros,
        )
        self.scorer = Scorer(
            self.run_program,
            token_buckets=shapes.token_buckets,
            token_block=shapes.token_block,
            max_len=self.max_len,
            vocab_size=static.context.config.vocab_size,
            has_adapters=self.has_adapters,
            shares=not self.has_states,
        )
        self.routed_reader = RoutedReader.make(self.run_program, static, num_pages)

    @property
    def model_config(self) -> ModelConfig:
        return self._static.context.config

    @property
    def max_len(self) -> int:
        return self.shapes.table_width * self._static.page_size

    @property
    def max_steps(self) -> int:
        return self._static.max_steps

    def row_tokens(self, size: int) -> tuple[int, ...]:
        """Tokens of a row in a step of that batch size: 1, and others if it verifies drafts."""
        return self._static.row_tokens(size)

    @property
    def shares_prompts(self) -> bool:
        """Whether rows with the same first pages read them together."""
        config = self.model_config
        has_full = not all(map(config.attention.slides, config.cached_layers))
        return self._static.attention.shares_prompts and has_full

    @property
    def has_windows(self) -> bool:
        return self._static.has_windows

    @property
    def has_states(self) -> bool:
        return self.model_config.linear_attention is not None

    @property
    def has_adapters(self) -> bool:
        return self._static.context.lora_rank > 0

    # ------------------------------------------------------------------ steps

    def dispatch(
        self, plan: SchedulerOutput, meanwhile: Callable[[], None], *, is_timed: bool = False
    ) -> PendingStep:
        """Dispatches what the scheduler planned; `PendingStep.wait` waits for it.

        Only prompt log-probs are waited for here. If scoring fails, only its request fails; all
        other failures are raised, here or by `wait`. `meanwhile` is called when the device has
        work. `is_timed` waits for the prefill, so that its time does not count as the decode's.
        """
        started_s, num_compiles = time.perf_counter(), self.programs.num_compiles
        failures: Mapping[str, EngineError] = {}
        to_score = [request for request in plan.started if request.needs_prompt_logprobs]
        if to_score:
            meanwhile()
            failures = self._score_prompts(to_score)
        scored_s = time.perf_counter()
        if plan.early_copies:
            self.copy_pages(plan.early_copies, plan.window_pages)
        if plan.states is not None:
            self.copy_states(plan.states.early)
        if plan.prefill:
            self.prefill(plan.prefill, plan.window_pages)
        if plan.copies:
            self.copy_pages(plan.copies, plan.window_pages)
        if plan.states is not None:
            self.copy_states(plan.states.late)
        if is_timed and plan.decode:
            self.kv_memory.check()
        prefilled_s = time.perf_counter()
        decode = self.decode(plan) if plan.decode else None
        meanwhile()
        return PendingStep(
            decode,
            self.kv_memory.check,
            self.weight_version,
            self.programs.num_compiles - num_compiles,
            failures,
            started_s,
            scored_s,
            prefilled_s,
        )

    def _score_prompts(self, requests: Sequence[Request]) -> dict[str, EngineError]:
        """Scores each prompt once that needs log-probs; returns failures by request id."""
        done: dict[Any, PromptLogprobs] = {}
        failures: dict[str, EngineError] = {}
        for request in requests:
            key = (tuple(request.prompt_ids), request.adapter, request.logprob_options)
            try:
                if key not in done:
                    done[key] = self.scorer.score_prompt(request)
                request.prompt_logprobs = done[key]
            except NonFiniteLogitsError as error:
                forget_locals(error)
                failures[request.rid] = error
            except Exception as error:  # no pages were donated: the step can go on
                logger.exception("scoring a prompt failed")
                forget_locals(error)
                failure = EngineStepError(f"scoring the prompt of {request.rid} failed: {error!r}")
                failure.__cause__ = error
                failures[request.rid] = failure
        return failures

    def prefill(self, chunks: Sequence[PrefillChunk], windows: np.ndarray | None = None) -> None:
        batches = build_prefill_batches(
            chunks,
            buckets=self.shapes.token_buckets,
            per_pass=self._static.prefill_pass,
            block=self.shapes.token_block,
            page_size=self._static.page_size,
            table_width=self.shapes.table_width,
            has_adapters=self.has_adapters,
            has_states=self.has_states,
            windows=windows,
        )
        for batch in batches:
            self.run_program(ProgramCall("prefill", (batch,)))

    def copy_pages(self, copies: Sequence[PageCopy], windows: np.ndarray | None = None) -> None:
        """Dispatches page copies; does not wait for the device. No page is source and target."""
        max_copies, num_pages = self.shapes.batch_buckets[-1], self.kv_memory.num_pages
        args = build_copies(copies, max_copies=max_copies, num_pages=num_pages, windows=windows)
        self.run_program(ProgramCall("copy_pages", args))

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        """Dispatches copies of recurrent states; does not wait. No slot is source and target."""
        size = self.shapes.batch_buckets[-1]
        for start in range(0, len(copies), size):
            self.run_program(ProgramCall("copy_states", build_state_copies(copies[start:], size)))

    def decode(self, output: SchedulerOutput) -> PendingDecode:
        order, shares = decode_order(output.decode, self._static.page_size)
        shares = shares and self.shares_prompts
        rows = [output.decode[index] for index in order]
        batch = build_decode_batch(
            rows,
            [output.step_limits[index] for index in order],
            buckets=self.shapes.batch_buckets,
            table_width=self.shapes.table_width,
            has_adapters=self.has_adapters,
            has_states=self.has_states,
            windows=output.window_pages,
        )
        size, vocab_size = len(batch.input_ids), self.model_config.vocab_size
        sampling = build_sampling_batch(rows, size)
        num_tokens, row_tokens = output.num_steps, 1
        if output.drafts is not None:  # rejected drafts are recorded too
            row_tokens = output.drafts.row_tokens
            num_tokens = max(output.step_limits) + row_tokens
        min_shared: Any = np.int32(MIN_SHARED_KEYS) if shares else None
        options = RowOptions(
            build_table(rows, size, vocab_size, num_tokens),
            build_logprob_batch(rows, size, vocab_size),
            build_mask_batch(rows, size),
            build_allowed_batch(rows, size, vocab_size, row_tokens),
            min_shared,
        )
        max_finished = output.max_finished or rows_above_smaller_bucket(
            self.shapes.batch_buckets, len(rows)
        )
        limits = np.int32(output.num_steps), np.int32(max_finished)
        drafts = None
        if output.drafts is not None:
            assert self.shapes.text_sizes is not None
            sources = [output.drafts.rows[index] for index in order]
            drafts = build_draft_batch(sources, size, self.shapes.text_sizes, row_tokens)
        call = ProgramCall("decode", (batch, sampling, options, drafts, *limits))
        result = self.run_program(call)
        for leaf in jax.tree.leaves(result):
            leaf.copy_to_host_async()
        return PendingDecode(result, rows, order)

    def run_program(self, call: ProgramCall) -> Any:
        return self.kv_memory.run_program(call, self.weights)

    # ------------------------------------------------------------------ weights

    def swap_weights(self, weights: Mapping[str, jax.Array]) -> None:
        """Serves these weights from the next dispatch on; drops the old ones."""
        self.weights = dict(weights)

    def empty_slots(self) -> dict[str, jax.Array]:
        return {} if self._slots is None else empty_slots(self._slots)

    def checksum_weights(
        self, asleep: Mapping[str, HostArray] | None = None
    ) -> Callable[[], dict[str, str]]:
        """Makes checksums of the current weights in logical shapes, see `weights.checksum`.

        Any thread may call the result if `is_on_one_device`. Weights asleep on the host go through
        the device one by one.
        """
        targets = self._weight_targets()
        if not asleep:
            return functools.partial(checksums, dict(self.weights), targets)
        kept = dict(asleep)

        def make() -> dict[str, str]:
            found: dict[str, str] = {}
            for name, weight in kept.items():
                found |= checksums({name: to_device(weight)}, targets)
            return found

        return make

    def differing_weights(self, source: Any, rules: Sequence[WeightRule]) -> list[str]:
        """Names of weights whose bits differ from a mapped pytree of arrays."""
        plan, arrays = WeightPlanner(self._weight_targets()).plan(source, rules)
        return differing(plan, arrays, self.weights)

    def _weight_targets(self) -> Mapping[str, TargetSpec]:
        return self._placement.weight_targets(self._static.model.param_specs(self.model_config))

    @property
    def weights_bytes(self) -> int:
        return self._placement.held_bytes(self.weights.values())

    @property
    def is_on_one_device(self) -> bool:
        """Whether other threads may start programs on the engine's device."""
        return self._placement.mesh.size == 1

    def weights_to_host(self) -> dict[str, HostArray]:
        return to_host(self.weights, self._host_memory)

    def weights_from_host(self, copy: Mapping[str, HostArray]) -> None:
        self.weights = to_device(dict(copy))

    def release(self) -> None:
        self.weights = {}
        self.kv_memory.drop()
        self.programs.clear()
