from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from sgljax_engine.errors import CompileForbiddenError
from sgljax_engine.observability.progress import ProgressListener, reporting
from sgljax_engine.runner.batches.batch import build_decode_batch, empty_prefill_batch
from sgljax_engine.runner.batches.drafts import build_draft_batch
from sgljax_engine.runner.batches.page_ids import (
    build_copies,
    build_state_copies,
    no_windows,
)
from sgljax_engine.runner.batches.sampling import build_sampling_batch, empty_table, table_buckets
from sgljax_engine.runner.compile.compiled import ProgramCall
from sgljax_engine.runner.programs.decode import RowOptions
from sgljax_engine.runner.runner import ModelRunner
from sgljax_engine.sampling.table import SamplingTable
from sgljax_engine.types import Request


class Warmup:
    def __init__(self, runner: ModelRunner, *, forbid_compile: bool) -> None:
        self._runner = runner
        self._forbid_compile = forbid_compile
        self._has_score = self._has_table = False

    def compile_all(
        self,
        *,
        include_score: bool = False,
        include_table: bool = False,
        progress: ProgressListener | None = None,
    ) -> int:
        """Compiles and runs every program but those left out; returns how many were new.

        Programs of `Scorer.score`, and decode buckets for rows that change logits, are asked for.
        """
        runner, programs, kv_memory = self._runner, self._runner.programs, self._runner.kv_memory
        kv_memory.allocate()
        before, was_sealed = programs.num_compiles, programs.is_sealed
        programs.is_sealed = False
        try:
            calls = list(warm_calls(runner, include_score, include_table))
            num_new = programs.count_new(calls)
            with reporting(progress, "compile programs", num_new, "program") as advance:
                programs.compile(calls, kv_memory.state(runner.weights), lambda: advance(1))
            for call in calls:
                jax.block_until_ready(runner.run_program(call))
            windows = no_windows(kv_memory.num_pages) if self._runner.has_windows else None
            kv_memory.load_pages(kv_memory.save_pages([0], windows), [0], windows)
            if runner.has_states:
                kv_memory.load_states(kv_memory.save_states([0]))
        except BaseException:
            programs.is_sealed = was_sealed
            raise
        programs.is_sealed = self._forbid_compile
        self._has_score |= include_score
        self._has_table |= include_table
        return programs.num_compiles - before

    def check(self, request: Request) -> None:
        """Raises CompileForbiddenError if a request needs programs that `compile_all` left out."""
        options, params = request.logprob_options, request.params
        needs = ""
        if params.changes_logits and not self._has_table:
            needs = "warmup(include_table=True), since it changes logits"
        elif options.start_len >= 0 and not self._has_score:
            needs = "warmup(include_score=True), since it asks for prompt log-probs"
        elif options.has_extras:
            needs = "programs for top_logprobs_num and token_ids_logprob, which warmup leaves out"
        if needs:
            raise CompileForbiddenError(f"forbid_compile is set and the request needs {needs}")


def warm_calls(
    runner: ModelRunner, include_score: bool, include_table: bool
) -> Iterator[ProgramCall]:
    """A call of every program; those that take longest to compile come first."""
    shapes = runner.shapes
    windows = no_windows(runner.kv_memory.num_pages) if runner.has_windows else None
    vocab_size = runner.model_config.vocab_size
    for size in shapes.batch_buckets:
        widths = table_buckets(vocab_size) if include_table else ()
        tables = [None, *(empty_table(size, width, vocab_size) for width in widths)]
        for table in tables:
            for row_tokens in runner.row_tokens(size):
                yield _decode_call(runner, size, row_tokens, table)
    for size in shapes.token_buckets:
        batch = empty_prefill_batch(
            size,
            block=shapes.token_block,
            table_width=shapes.table_width,
            has_adapters=runner.has_adapters,
            has_states=runner.has_states,
            has_windows=runner.has_windows,
        )
        yield ProgramCall("prefill", (batch,))
    if include_score:
        yield from runner.scorer.warm_calls()
    max_copies, num_pages = shapes.batch_buckets[-1], runner.kv_memory.num_pages
    copies = build_copies([], max_copies=max_copies, num_pages=num_pages, windows=windows)
    yield ProgramCall("copy_pages", copies)
    if runner.has_states:
        yield ProgramCall("copy_states", build_state_copies([], max_copies))
    if runner.routed_reader is not None:
        yield runner.routed_reader.warm_call()


def _decode_call(
    runner: ModelRunner, size: int, row_tokens: int, table: SamplingTable | None
) -> ProgramCall:
    """A dispatch of rows that take no step."""
    shapes, drafts = runner.shapes, None
    rows = build_decode_batch(
        [],
        [],
        buckets=[size],
        table_width=shapes.table_width,
        has_adapters=runner.has_adapters,
        has_states=runner.has_states,
        windows=no_windows(runner.kv_memory.num_pages) if runner.has_windows else None,
    )
    if row_tokens > 1:
        assert shapes.text_sizes is not None
        drafts = build_draft_batch([], size, shapes.text_sizes, row_tokens)
    sampling, none = build_sampling_batch([], size), np.int32(0)
    return ProgramCall("decode", (rows, sampling, RowOptions(table), drafts, none, none))


def largest(calls: Iterable[ProgramCall]) -> list[ProgramCall]:
    """The call with the largest arguments of each program; decode with drafts is one by itself."""
    found: dict[Any, ProgramCall] = {}
    for call in calls:
        key = call.name, jax.tree.structure(call.args)
        if key not in found or _num_elements(call) > _num_elements(found[key]):
            found[key] = call
    return list(found.values())


def _num_elements(call: ProgramCall) -> int:
    return sum(np.size(leaf) for leaf in jax.tree.leaves(call.args))


def call_size(call: ProgramCall) -> int:
    """Rows of decode, tokens of prefill and score, pages of copy_pages."""
    return max(np.shape(leaf)[0] for leaf in jax.tree.leaves(call.args[0]) if np.ndim(leaf))
