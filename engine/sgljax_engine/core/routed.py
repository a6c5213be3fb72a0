"""When the experts of tokens are read: before a request loses its pages. Engine thread only."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from sgljax_engine.runner.runner import ModelRunner
from sgljax_engine.types import Request, SchedulerOutput, StepOutput

logger = logging.getLogger(__name__)


def read_after_step(runner: ModelRunner, plan: SchedulerOutput, result: StepOutput) -> None:
    """Reads the experts of requests that a step ends, if they are kept.

    And of those with stop strings, which may be answered after any step without the engine thread.
    The scheduler must not have taken the step's results yet.
    """
    if runner.routed_reader is None:
        return
    runner.routed_reader.read(
        [
            (request, request.kv_len + len(row.token_ids))
            for request, row in zip(plan.decode, result.rows, strict=True)
            if row.stopped or len(row.token_ids) == request.num_remaining or request.params.stop
        ]
    )


def read_before_end(runner: ModelRunner, requests: Iterable[Request]) -> None:
    """Reads the experts of requests that are about to be ended, if all of them are there."""
    if runner.routed_reader is None or not runner.kv_memory.is_allocated:
        return
    complete = [r for r in requests if r.pages and r.num_computed == r.kv_len]
    try:
        runner.routed_reader.read([(request, request.kv_len) for request in complete])
    except Exception:  # they are answered without; the next step finds out what is broken
        logger.exception("reading the experts of ended requests failed")
