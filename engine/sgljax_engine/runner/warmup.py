from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

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
from sgljax_engine.runner.batches.sampling import (
    allowed_batch,
    build_sampling_batch,
    empty_table,
    guided_buckets,
    mask_batch,
    table_buckets,
)
from sgljax_engine.runner.compile.compiled import ProgramCall
from sgljax_engine.runner.programs.decode import RowOptions
from sgljax_engine.runner.runner import ModelRunner
from sgljax_engine.sampling_params import SAMPLING_MASK_SIZES
from sgljax_engine.types import Request


class Warmup:
    def __init__(self, runner: ModelRunner, *, forbid_compile: bool) -> None:
        self._runner = runner
        self._forbid_compile = forbid_compile
        self._included: frozenset[Extra] = frozenset()

    def compile_all(
        self,
        include: frozenset[Extra] = frozenset(),
        progress: ProgressListener | None = None,
    ) -> int:
        """Compiles and runs every program but those left out; returns how many were new."""
        runner, programs, kv_memory = self._runner, self._runner.programs, self._runner.kv_memory
        kv_memory.allocate()
        before, was_sealed = programs.num_compiles, programs.is_sealed
        programs.is_sealed = False
        try:
            calls = list(warm_calls(runner, include, has_shared=True))
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
        self._included |= include
        return programs.num_compiles - before

    def check(self, request: Request) -> None:
        """Raises CompileForbiddenError if a request needs programs that `compile_all` left out."""
        asked = [extra for extra, asks in _ASKS.items() if asks(request)]
        needs = ""
        for extra in asked:
            if extra not in self._included:
                needs = f"warmup(include_{extra}=True)"
        if len({"table", "masks", "grammars"} & {*asked}) > 1:
            needs = f"programs for {' and '.join(asked)} together, which warmup leaves out"
        elif request.logprob_options.has_extras:
            needs = "programs for top_logprobs_num and token_ids_logprob, which warmup leaves out"
        if needs:
            raise CompileForbiddenError(f"forbid_compile is set and the request needs {needs}")


Extra = Literal["score", "table", "masks", "grammars"]
"""Programs that warm-up compiles if it is asked to: see `Engine.warmup`."""

_ASKS: Mapping[Extra, Callable[[Request], bool]] = {
    "score": lambda request: request.logprob_options.start_len >= 0,
    "table": lambda request: request.params.changes_logits,
    "masks": lambda request: request.params.return_sampling_mask,
    "grammars": lambda request: request.guide is not None,
}


def warm_calls(
    runner: ModelRunner, include: frozenset[Extra] = frozenset(), *, has_shared: bool = False
) -> Iterator[ProgramCall]:
    """A call of every program; those that take longest to compile come first.

    With `has_shared`, those too in which rows read the keys that they share together.
    """
    shapes = runner.shapes
    windows = no_windows(runner.kv_memory.num_pages) if runner.has_windows else None
    for size in shapes.batch_buckets:
        for row_tokens in runner.row_tokens(size):
            for options in _row_options(runner, size, row_tokens, include):
                yield _decode_call(runner, size, row_tokens, options)
                if has_shared and runner.shares_prompts and size > 1:
                    options = options._replace(min_shared_keys=np.int32(0))
                    yield _decode_call(runner, size, row_tokens, options)
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
    if "score" in include:
        yield from runner.scorer.warm_calls()
    max_copies, num_pages = shapes.batch_buckets[-1], runner.kv_memory.num_pages
    copies = build_copies([], max_copies=max_copies, num_pages=num_pages, windows=windows)
    yield ProgramCall("copy_pages", copies)
    if runner.has_states:
        yield ProgramCall("copy_states", build_state_copies([], max_copies))
    if runner.routed_reader is not None:
        yield runner.routed_reader.warm_call()


def _row_options(
    runner: ModelRunner, size: int, row_tokens: int, include: frozenset[Extra]
) -> Iterator[RowOptions]:
    vocab_size = runner.model_config.vocab_size
    yield RowOptions()
    for width in table_buckets(vocab_size) if "table" in include else ():
        yield RowOptions(empty_table(size, width, vocab_size))
    for most in SAMPLING_MASK_SIZES if "masks" in include else ():
        yield RowOptions(masks=mask_batch(np.full(size, most, np.int32)))
    for count in guided_buckets(size) if "grammars" in include else ():
        yield RowOptions(allowed=allowed_batch(count, size, vocab_size, row_tokens))


def _decode_call(
    runner: ModelRunner, size: int, row_tokens: int, options: RowOptions
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
    return ProgramCall("decode", (rows, sampling, options, drafts, none, none))


def largest(calls: Iterable[ProgramCall]) -> list[ProgramCall]:
    """The call with the largest arguments of each program; decode with drafts is one by itself.

    Of decode with shared keys and without, the first: it needs more memory.
    """
    found: dict[Any, ProgramCall] = {}
    for call in calls:
        alike = call.args
        if call.name == "decode":
            alike = tuple(
                x._replace(min_shared_keys=None) if isinstance(x, RowOptions) else x for x in alike
            )
        key = call.name, jax.tree.structure(alike)
        if key not in found or _num_elements(call) > _num_elements(found[key]):
            found[key] = call
    return list(found.values())


def _num_elements(call: ProgramCall) -> int:
    return sum(np.size(leaf) for leaf in jax.tree.leaves(call.args))


def call_size(call: ProgramCall) -> int:
    """Rows of decode, tokens of prefill and score, pages of copy_pages."""
    return max(np.shape(leaf)[0] for leaf in jax.tree.leaves(call.args[0]) if np.ndim(leaf))
