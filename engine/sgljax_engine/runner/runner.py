"""Owns the weights, the KV pages and the compiled programs. Engine thread only."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from sgljax_engine.cache.contiguous_kv import ContiguousKV, ContiguousShapes, allocate_contiguous_kv
from sgljax_engine.cache.kv_pages import KVPages, allocate_kv_pages
from sgljax_engine.errors import (
    CompileForbiddenError,
    EngineError,
    EngineStepError,
    forget_locals,
)
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.observability.progress import ProgressListener, reporting
from sgljax_engine.runner import programs
from sgljax_engine.runner.batch import (
    build_copies,
    build_decode_batch,
    build_prefill_batches,
    decode_order,
    empty_prefill_batch,
    rows_above_smaller_bucket,
)
from sgljax_engine.runner.compiled import ProgramCache, ProgramCall, ProgramState, takes_kv
from sgljax_engine.runner.contiguous_slots import ContiguousSlots
from sgljax_engine.runner.host_arrays import HostArray, HostMemory, host_memory, to_device, to_host
from sgljax_engine.runner.placement import Placement
from sgljax_engine.runner.results import PendingDecode, PendingStep
from sgljax_engine.runner.sampling_batch import (
    build_logprob_batch,
    build_sampling_batch,
    build_table,
    empty_table,
    table_buckets,
)
from sgljax_engine.runner.saved_pages import SavedPages, chunk_ids, chunk_size, page_chunks
from sgljax_engine.runner.scorer import Scorer
from sgljax_engine.types import (
    PageCopy,
    PrefillChunk,
    PromptLogprobs,
    Request,
    SchedulerOutput,
)
from sgljax_engine.weights.adapters import AdapterSlots, empty_slots
from sgljax_engine.weights.rules import WeightRule
from sgljax_engine.weights.sync import WeightMaker, checksums, differing

logger = logging.getLogger(__name__)


class ModelRunner:
    """Turns chunks and rows into device programs.

    Attributes:
        programs: The compiled ones.
        weights: Physical weights by name.
        weight_version: Their version; any thread may read it.
        kv: All pages.
        contiguous_kv: Copies of the pages of decode rows, for attention that reads those; else
            empty.
    """

    def __init__(
        self,
        *,
        static: programs.ProgramContext,
        placement: Placement,
        weights: Mapping[str, jax.Array],
        num_pages: int,
        table_width: int,
        batch_buckets: Sequence[int],
        token_buckets: Sequence[int],
        token_block: int,
        contiguous_shapes: ContiguousShapes | None,
        forbid_compile: bool,
        slots: AdapterSlots | None = None,
    ) -> None:
        """Allocates the KV pages.

        Args:
            static: What programs are compiled for.
            placement: Devices and shardings.
            weights: Physical weights by name.
            num_pages: KV pages in the pool.
            table_width: Pages of the longest request.
            batch_buckets: Decode batch sizes, ascending.
            token_buckets: Prefill sizes, ascending, multiples of `token_block`.
            token_block: Tokens in a prefill block.
            contiguous_shapes: Shapes of the rows that decode attention reads; None if it reads
                pages.
            forbid_compile: Refuse to compile once `warmup` has run.
            slots: Room for adapters, which is among the weights; None without.
        """
        self._slots = slots
        self._static = static
        self._placement = placement
        self._num_pages = num_pages
        self._table_width = table_width
        self._batch_buckets = tuple(batch_buckets)
        self._token_buckets = tuple(token_buckets)
        self._token_block = token_block
        self._contiguous_shapes = contiguous_shapes
        self._forbid_compile = forbid_compile
        self._host_memory: HostMemory = host_memory(placement.mesh.devices.flat[0])
        self._has_warm_score = self._has_warm_table = False
        self._has_adapters = static.context.lora_rank > 0
        self.programs = ProgramCache(static, placement)
        self._scorer = Scorer(
            lambda call: self._run(call.name, *call.args),
            token_buckets=token_buckets,
            token_block=token_block,
            max_len=table_width * static.page_size,
            vocab_size=static.context.config.vocab_size,
            has_adapters=self._has_adapters,
        )
        self.weights: dict[str, jax.Array] = dict(weights)
        self.weight_version = 0
        self._kv: KVPages = ()
        self.contiguous_kv: ContiguousKV = ()
        self._contiguous_slots = ContiguousSlots()
        self._allocate_kv()

    @property
    def model_config(self) -> ModelConfig:
        """The model's shape."""
        return self._static.context.config

    @property
    def kv(self) -> KVPages:
        """The pages; none while they are not allocated. Rows copy those that are set anew."""
        return self._kv

    @kv.setter
    def kv(self, pages: KVPages) -> None:
        self._contiguous_slots.forget()
        self._kv = pages

    # ------------------------------------------------------------------ steps

    def dispatch(
        self, plan: SchedulerOutput, meanwhile: Callable[[], None], *, is_timed: bool = False
    ) -> PendingStep:
        """Has the device do what the scheduler planned; `PendingStep.wait` waits for it.

        Prompt log-probs alone are waited for here. A failure to score is its request's alone; all
        other failures are raised, here or by `wait`.

        Args:
            plan: Not empty.
            meanwhile: Called when the device has work, before anything waits for it.
            is_timed: Wait for the prefill, so that its time does not count as the decode's.
        """
        started_s, num_compiles = time.perf_counter(), self.programs.num_compiles
        failures: Mapping[str, EngineError] = {}
        to_score = [request for request in plan.started if request.needs_prompt_logprobs]
        if to_score:
            meanwhile()
            failures = self._score_prompts(to_score)
        scored_s = time.perf_counter()
        if plan.prefill:
            self.prefill(plan.prefill)
        if plan.copies:
            self.copy_pages(plan.copies)
        if is_timed and plan.decode:
            self.check_kv()
        prefilled_s = time.perf_counter()
        decode = self.decode(plan) if plan.decode else None
        meanwhile()
        return PendingStep(
            decode,
            self.check_kv,
            self.weight_version,
            self.programs.num_compiles - num_compiles,
            failures,
            started_s,
            scored_s,
            prefilled_s,
        )

    def _score_prompts(self, requests: Sequence[Request]) -> dict[str, EngineError]:
        """Takes prompt log-probs, of each prompt once; returns failures by request id."""
        done: dict[Any, PromptLogprobs] = {}
        failures: dict[str, EngineError] = {}
        for request in requests:
            key = (tuple(request.prompt_ids), request.adapter, request.logprob_options)
            try:
                if key not in done:
                    done[key] = self.score_prompt(request)
                request.prompt_logprobs = done[key]
            except Exception as error:  # no pages were donated: the step can go on
                logger.exception("scoring a prompt failed")
                forget_locals(error)
                failure = EngineStepError(f"scoring the prompt of {request.rid} failed: {error!r}")
                failure.__cause__ = error
                failures[request.rid] = failure
        return failures

    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        """Dispatches the chunks; does not wait for the device."""
        self._contiguous_slots.changed(chunk.request for chunk in chunks)
        batches = build_prefill_batches(
            chunks,
            buckets=self._token_buckets,
            per_pass=self._static.prefill_pass,
            block=self._token_block,
            page_size=self._static.page_size,
            table_width=self._table_width,
            has_adapters=self._has_adapters,
        )
        for batch in batches:
            self._run("prefill", batch)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Dispatches page copies; does not wait for the device. No page is source and target."""
        self._run(
            "copy_pages",
            *build_copies(copies, max_copies=self._batch_buckets[-1], num_pages=self._num_pages),
        )

    def decode(self, output: SchedulerOutput) -> PendingDecode:
        """Dispatches the decode rows; does not wait for the device."""
        order = decode_order(output.decode, self._static.page_size)
        rows = [output.decode[place] for place in order]
        batch = build_decode_batch(
            rows,
            [output.step_limits[place] for place in order],
            buckets=self._batch_buckets,
            table_width=self._table_width,
            has_adapters=self._has_adapters,
        )
        self._contiguous_slots.changed(output.started)
        if self.contiguous_kv:
            num_ready = self._contiguous_slots.place(rows, batch, output.num_steps)
            batch = batch._replace(num_ready=np.int32(num_ready))
        size, vocab_size = len(batch.input_ids), self.model_config.vocab_size
        sampling = build_sampling_batch(rows, size, vocab_size)
        options = programs.RowOptions(
            build_table(rows, size, vocab_size, output.num_steps),
            build_logprob_batch(rows, size, vocab_size),
        )
        max_finished = output.max_finished or rows_above_smaller_bucket(
            self._batch_buckets, len(rows)
        )
        limits = np.int32(output.num_steps), np.int32(max_finished)
        result = self._run("decode", batch, sampling, options, *limits)
        for leaf in jax.tree.leaves(result):
            leaf.copy_to_host_async()
        return PendingDecode(result, rows, order)

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        starts: Sequence[int],
        temperature: float,
        adapter: int,
    ) -> list[np.ndarray]:
        """See `Scorer.score`."""
        return self._scorer.score(sequences, starts, temperature, adapter)

    def score_prompt(self, request: Request) -> PromptLogprobs:
        """See `Scorer.score_prompt`."""
        return self._scorer.score_prompt(request)

    def _run(self, program: str, *args: Any) -> Any:
        """Dispatches a program and returns its result, which nobody has waited for."""
        if takes_kv(program):
            self.take_kv()
        call = ProgramCall(program, args)
        state, result = self.programs.run(call, self._state)
        self._kv, self.contiguous_kv = state.kv, state.contiguous_kv
        return result

    @property
    def _state(self) -> ProgramState:
        return ProgramState(self.weights, self.kv, self.contiguous_kv)

    # ------------------------------------------------------------------ state

    def swap_weights(self, weights: Mapping[str, jax.Array]) -> None:
        """Serves these weights from the next dispatch on; the old ones are let go."""
        self._contiguous_slots.forget()
        self.weights = dict(weights)

    def empty_slots(self) -> dict[str, jax.Array]:
        """Room for adapters without any; nothing for an engine without."""
        return {} if self._slots is None else empty_slots(self._slots)

    def checksum_weights(
        self, asleep: Mapping[str, HostArray] | None = None
    ) -> Callable[[], dict[str, str]]:
        """Makes checksums of the weights of now, each in its logical shape.

        See `weights.checksum`. Any thread may call the result if `is_on_one_device`.

        Args:
            asleep: The weights, if they are on the host: they go through the device one by one.
        """
        specs = self._static.model.param_specs(self.model_config)
        targets = self._placement.weight_targets(specs)
        transposed = {name for name, target in targets.items() if target.is_transposed}
        if not asleep:
            return functools.partial(checksums, dict(self.weights), transposed)
        kept = dict(asleep)

        def make() -> dict[str, str]:
            found: dict[str, str] = {}
            for name, weight in kept.items():
                found |= checksums({name: to_device(weight)}, transposed)
            return found

        return make

    def differing_weights(self, source: Any, rules: Sequence[WeightRule]) -> list[str]:
        """Names of weights that lack the bits of a mapped pytree of arrays; see `sync.differing`.

        Raises:
            WeightSyncError: when the source does not map onto the weights.
        """
        targets = self._placement.weight_targets(self._static.model.param_specs(self.model_config))
        plan, arrays = WeightMaker(targets).plan(source, rules)
        return differing(plan, arrays, self.weights)

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights, as of `Placement.held_bytes`."""
        return self._placement.held_bytes(self.weights.values())

    @property
    def is_on_one_device(self) -> bool:
        """Whether other threads may start programs on the engine's device."""
        return self._placement.mesh.size == 1

    @property
    def is_deterministic(self) -> bool:
        """Whether the contents of a page are to have the same bits however they were computed."""
        return self._static.context.is_deterministic

    @property
    def kv_geometry(self) -> dict[str, int | str]:
        """What the contents of a page depend on, beside weights and tokens."""
        config = self.model_config
        return {
            "page_size": self._static.page_size,
            "dtype": self._placement.dtype.name,
            "num_layers": config.num_layers,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
        }

    def weights_to_host(self) -> dict[str, HostArray]:
        """A copy of the weights."""
        return to_host(self.weights, self._host_memory)

    def weights_from_host(self, copy: Mapping[str, HostArray]) -> None:
        """Serves the weights of a copy again."""
        self.weights = to_device(dict(copy))

    def check_kv(self) -> None:
        """Waits for all that writes pages; raises what failed there."""
        jax.block_until_ready((self.kv, self.contiguous_kv))

    def wait(self) -> None:
        """Waits for all that was dispatched; what failed there is found by the next step."""
        with contextlib.suppress(Exception):
            self.check_kv()

    @property
    def is_kv_allocated(self) -> bool:
        """False after `release_kv`, until a program needs the pages."""
        return bool(self.kv)

    def release_kv(self) -> int:
        """Gives the memory of pages and rows back; returns its bytes. Their contents are lost."""
        arrays = jax.tree.leaves((self.kv, self.contiguous_kv))
        num_bytes = self._placement.held_bytes(arrays)
        self.wait()  # memory that a program still writes is not free
        self.kv, self.contiguous_kv = (), ()
        return num_bytes

    def take_kv(self) -> int:
        """Takes the memory of pages and rows, unless they have it; returns its bytes."""
        if self.is_kv_allocated:
            return 0
        self._allocate_kv()
        return self._placement.held_bytes(jax.tree.leaves((self.kv, self.contiguous_kv)))

    def save_pages(self, pages: Sequence[int]) -> SavedPages:
        """Copies pages to the host; waits for it."""
        chunks: list[tuple[np.ndarray, Any]] = []
        for ids in chunk_ids(pages, self.pages_per_copy, self._num_pages):
            # Padding would be read from beyond the pool.
            call = ProgramCall("read_pages", (np.minimum(ids, self._num_pages - 1),))
            state, _ = self.programs.run(call, self._state)
            chunks.append((ids, to_host(state.moved, self._host_memory)))
        return SavedPages(chunks)

    def load_pages(self, saved: SavedPages, pages: Collection[int]) -> None:
        """Puts back those of these pages that were saved; see `load_chunks`."""
        self.load_chunks(saved.only(pages, self._num_pages))

    def load_rows(
        self,
        pages: Sequence[int],
        rows: Sequence[int],
        layers: Sequence[tuple[np.ndarray, np.ndarray]],
    ) -> None:
        """Puts row `rows[i]` of each layer's bits of k and v into `pages[i]`; see `load_chunks`."""
        self.take_kv()
        chunks = page_chunks(
            pages,
            rows,
            layers,
            size=self.pages_per_copy,
            num_pages=self._num_pages,
            sharding=self._placement.kv_sharding,
        )
        self.load_chunks(chunks)

    def load_chunks(self, chunks: Iterable[tuple[np.ndarray, Any]]) -> None:
        """Puts chunks as of `SavedPages` into the pages; waits for it.

        What fails leaves no pages at all.
        """
        self.take_kv()
        try:
            for ids, contents in chunks:
                state = self._state._replace(moved=to_device(contents))
                state, _ = self.programs.run(ProgramCall("write_pages", (ids,)), state)
                self.kv = state.kv
            self.check_kv()
        except BaseException:
            self.kv, self.contiguous_kv = (), ()
            raise

    @property
    def pages_per_copy(self) -> int:
        """Pages that are copied together, to the host or back; their memory must be taken."""
        size = sum(array.nbytes for array in jax.tree.leaves(self.kv)) // self._num_pages
        return chunk_size(size, self._num_pages)

    def recover_kv(self) -> bool:
        """Drops the pages if what failed took or spoilt them; True if they are gone.

        The next program allocates them anew. Pages that were donated to a failed program are
        deleted; those that a failed asynchronous program was to return raise when waited for;
        `load_pages` has let go of them by itself.
        """
        self._contiguous_slots.forget()
        if self.is_kv_allocated:
            try:
                self.check_kv()
            except Exception:
                self.kv, self.contiguous_kv = (), ()
            else:
                return False
        logger.warning("the KV pages were lost in a failed step; they are allocated anew")
        return True

    def release(self) -> None:
        """Lets go of weights, pages and programs."""
        self.weights, self.kv, self.contiguous_kv = {}, (), ()
        self.programs.clear()

    def _allocate_kv(self) -> None:
        config, placement = self.model_config, self._placement
        kv = allocate_kv_pages(
            num_layers=config.num_layers,
            num_pages=self._num_pages,
            page_size=self._static.page_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=placement.dtype,
            sharding=placement.kv_sharding,
        )
        rows: ContiguousKV = ()
        if self._contiguous_shapes is not None:
            rows = allocate_contiguous_kv(
                self._contiguous_shapes,
                num_layers=config.num_layers,
                dtype=placement.dtype,
                sharding=placement.contiguous_kv_sharding,
            )
        self.kv, self.contiguous_kv = kv, rows  # both or, if memory is short, none

    # ------------------------------------------------------------------ programs

    def warmup(
        self,
        *,
        include_score: bool = False,
        include_table: bool = False,
        progress: ProgressListener | None = None,
    ) -> int:
        """Compiles and runs every program but those below; returns how many were new.

        Args:
            include_score: Those of `score` too.
            include_table: The decode buckets for rows that change logits too, in every width.
            progress: Told of every program.
        """
        self.take_kv()
        self._contiguous_slots.forget()
        before, was_sealed = self.programs.num_compiles, self.programs.is_sealed
        self.programs.is_sealed = False
        try:
            calls = list(self._warm_calls(include_score, include_table))
            num_new = self.programs.count_new(calls)
            with reporting(progress, "compile programs", num_new, "program") as advance:
                self.programs.compile(calls, self._state, lambda: advance(1))
            for call in calls:
                jax.block_until_ready(self._run(call.name, *call.args))
            self.load_pages(self.save_pages([0]), [0])
        except BaseException:
            self.programs.is_sealed = was_sealed
            raise
        self.programs.is_sealed = self._forbid_compile
        self._has_warm_score |= include_score
        self._has_warm_table |= include_table
        return self.programs.num_compiles - before

    def _warm_calls(self, include_score: bool, include_table: bool) -> Iterator[ProgramCall]:
        """A call of every program; those that take longest to compile come first."""
        vocab_size = self.model_config.vocab_size
        for size in self._batch_buckets:
            batch = build_decode_batch(
                [],
                [],
                buckets=[size],
                table_width=self._table_width,
                has_adapters=self._has_adapters,
            )
            rows = batch, build_sampling_batch([], size, vocab_size)
            widths = table_buckets(vocab_size) if include_table else ()
            tables = [None, *(empty_table(size, width, vocab_size) for width in widths)]
            for table in tables:
                options = programs.RowOptions(table)
                yield ProgramCall("decode", (*rows, options, np.int32(1), np.int32(1)))
        for size in self._token_buckets:
            batch = empty_prefill_batch(
                size,
                block=self._token_block,
                table_width=self._table_width,
                has_adapters=self._has_adapters,
            )
            yield ProgramCall("prefill", (batch,))
        if include_score:
            yield from self._scorer.warm_calls()
        copies = build_copies([], max_copies=self._batch_buckets[-1], num_pages=self._num_pages)
        yield ProgramCall("copy_pages", copies)

    def check_warm(self, request: Request) -> None:
        """Raises CompileForbiddenError if a request needs programs that warm-up left out.

        Found out in a step, it would fail all requests of the step.
        """
        if not self.programs.is_sealed:
            return
        options, params = request.logprob_options, request.params
        needs = ""
        if params.changes_logits and not self._has_warm_table:
            needs = "warmup(include_table=True), since it changes logits"
        elif options.start_len >= 0 and not self._has_warm_score:
            needs = "warmup(include_score=True), since it asks for prompt log-probs"
        elif options.has_extras:
            needs = "programs for top_logprobs_num and token_ids_logprob, which warmup leaves out"
        if needs:
            raise CompileForbiddenError(f"forbid_compile is set and the request needs {needs}")
