"""Measures what decode steps cost, without drafts and with, on this machine. Engine thread only."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from sgljax_engine.runner.batches.batch import build_decode_batch
from sgljax_engine.runner.batches.drafts import build_draft_batch
from sgljax_engine.runner.batches.sampling import build_sampling_batch
from sgljax_engine.runner.compile.compiled import ProgramCall
from sgljax_engine.runner.programs.decode import RowOptions
from sgljax_engine.runner.programs.verify import Verified
from sgljax_engine.runner.runner import ModelRunner
from sgljax_engine.sampling.table import SamplingTable
from sgljax_engine.speculation.costs import StepCosts
from sgljax_engine.speculation.plan import ACCEPTANCE_KINDS, RowDrafts

_RUN_S = 0.02
"""Seconds of a run that is long enough for its start not to count."""

_MIN_STEPS, _MAX_STEPS = 2, 20
_ALL_S, _MIN_ROUNDS, _MAX_ROUNDS = 1.5, 3, 15
"""Seconds of all runs together, if that leaves enough of them."""

_NEVER, _ALWAYS = 1e9, 1e-9


def measure_costs(runner: ModelRunner, size: int) -> StepCosts:
    """Runs steps of a batch of that size, and of each width.

    The rows share a page, whose contents are put back; of sliding windows, the null page.
    """
    kv_memory = runner.kv_memory
    kv_memory.take()
    windows = _null_windows(runner)
    tokens = runner.verify_widths(size)
    makers = [functools.partial(decode_call, runner, size)]
    makers += [
        functools.partial(verify_call, runner, size, width=width) for width in range(len(tokens))
    ]
    saved = kv_memory.save_pages([0], windows)
    try:
        calls = [make(_num_steps(runner, make)) for make in makers]
        started_s = time.perf_counter()
        rounds: list[list[float]] = []
        # In turns, since other processes may disturb some of them.
        while len(rounds) < _MIN_ROUNDS or (
            len(rounds) < _MAX_ROUNDS and time.perf_counter() - started_s < _ALL_S
        ):
            rounds.append([_timed(runner, call) for call in calls])
    finally:
        kv_memory.load_pages(saved, [0], windows)
    plain, *made = map(min, zip(*rounds, strict=True))
    # The program without drafts does no more than one that has none.
    return StepCosts(min(plain, made[0]), tuple(made), tokens)


def decode_call(
    runner: ModelRunner, size: int, num_steps: int, *, table: SamplingTable | None = None
) -> ProgramCall:
    """A dispatch without drafts of rows that share a page and take so many steps; 0 does nothing.

    Args:
        runner: Has the sizes.
        size: Of the batch.
        num_steps: How many.
        table: Of rows whose settings change logits.
    """
    rows, sampling, limits = _rows(runner, size, num_steps)
    return ProgramCall("decode", (rows, sampling, RowOptions(table), *limits))


def verify_call(
    runner: ModelRunner,
    size: int,
    num_steps: int,
    *,
    width: int,
    table: SamplingTable | None = None,
) -> ProgramCall:
    """The call of `decode_call`, with steps of the width at that index."""
    rows, sampling, limits = _rows(runner, size, num_steps)
    costs = np.full(len(runner.verify_widths(size)), _NEVER, np.float32)
    costs[width] = _ALWAYS
    repeated = np.zeros(2 * runner.num_drafts, np.int32)
    row = RowDrafts((), (), repeated, True, (1.0,) * ACCEPTANCE_KINDS, 1.0)
    assert runner.shapes.text_sizes is not None
    drafts = build_draft_batch([row] * size, size, runner.shapes.text_sizes, costs.tolist())
    options = RowOptions(table)
    return ProgramCall("verify", (rows, sampling, options, drafts, *limits))


def _rows(runner: ModelRunner, size: int, num_steps: int) -> tuple[Any, Any, tuple[Any, Any]]:
    """Rows of the same page, the settings of their sampling, and the limits of a dispatch."""
    shapes = runner.shapes
    rows = build_decode_batch(
        [],
        [],
        buckets=[size],
        table_width=shapes.table_width,
        has_adapters=runner.has_adapters,
        has_states=runner.has_states,
        windows=_null_windows(runner),
    )
    longest = runner.max_len if num_steps else 0
    rows = rows._replace(step_limits=np.full(size, longest, np.int32))
    sampling = build_sampling_batch([], size)
    return rows, sampling, (np.int32(num_steps), np.int32(size + 1))


def _null_windows(runner: ModelRunner) -> np.ndarray | None:
    """The null page as the window page of each page, so that steps write to no other."""
    if not runner.has_windows:
        return None
    return np.zeros(runner.kv_memory.num_pages, np.int32)


def _num_steps(runner: ModelRunner, make_call: Callable[[int], ProgramCall]) -> int:
    """Steps of a run that is long enough."""
    _timed(runner, make_call(_MIN_STEPS))  # compiles
    seconds = _timed(runner, make_call(_MIN_STEPS))
    # Few enough that drafts, all wrong, are still chosen at the end.
    most = min(runner.max_steps, runner.max_len // (1 + runner.num_drafts), _MAX_STEPS)
    return max(min(int(_RUN_S / seconds), most), min(_MIN_STEPS, runner.max_steps))


def _timed(runner: ModelRunner, call: ProgramCall) -> float:
    """Seconds of a dispatch, divided by its steps."""
    started_s = time.perf_counter()
    result = jax.device_get(runner.run(call))
    seconds = time.perf_counter() - started_s
    if isinstance(result, Verified):
        return seconds / max(int(result.num_steps.sum()), 1)
    return seconds / max(int(result.num_tokens.max()), 1)
