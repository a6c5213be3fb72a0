"""Reads the experts that tokens went through out of the KV pages. Engine thread only.

They are read before a request loses its pages.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from sgljax_engine.cache.kv_pages import routed_width
from sgljax_engine.runner.compile.compiled import ProgramCall
from sgljax_engine.runner.kv.saved_pages import chunk_ids, chunk_size
from sgljax_engine.runner.programs.context import ProgramContext
from sgljax_engine.types import Request, SchedulerOutput, StepOutput

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
"""Pages are read in chunks of about this size, so that one program serves any number of them."""


class RoutedReader:
    """Brings the rows of `KVPages.routed`, [layers, experts of a token], to requests."""

    def __init__(
        self,
        run: Callable[[ProgramCall], Any],
        row_shape: tuple[int, int],
        page_size: int,
        num_pages: int,
    ) -> None:
        self._run = run
        self._row_shape = row_shape
        self._page_size = page_size
        self._num_pages = num_pages
        page_bytes = page_size * routed_width(math.prod(row_shape))
        self._chunk = chunk_size(page_bytes, num_pages, _CHUNK_BYTES)

    @classmethod
    def make(
        cls, run: Callable[[ProgramCall], Any], static: ProgramContext, num_pages: int
    ) -> RoutedReader | None:
        config = static.context.config
        if not static.context.returns_routed or config.moe is None:
            return None
        row_shape = config.num_layers, config.moe.num_experts_per_token
        return cls(run, row_shape, static.page_size, num_pages)

    def warm_call(self) -> ProgramCall:
        return ProgramCall("read_routed", (np.zeros(self._chunk, np.int32),))

    def read_after_step(self, plan: SchedulerOutput, result: StepOutput) -> None:
        """Reads the experts of requests that a step ends, before the scheduler takes its results.

        And of those with stop strings, which may be answered after any step without the engine
        thread.
        """
        self.read(
            [
                (request, request.kv_len + len(row.token_ids))
                for request, row in zip(plan.decode, result.rows, strict=True)
                if row.stopped or len(row.token_ids) == request.num_remaining or request.params.stop
            ]
        )

    def read_before_end(self, requests: Iterable[Request]) -> None:
        """Reads the experts of requests that are about to be ended, if all of them are there."""
        complete = [r for r in requests if r.pages and r.num_computed == r.kv_len]
        try:
            self.read([(request, request.kv_len) for request in complete])
        except Exception:  # they are answered without; the next step finds out what is broken
            logger.exception("reading the experts of ended requests failed")

    def read(self, wanted: Sequence[tuple[Request, int]]) -> None:
        """Fills `Request.routed` up to so many computed tokens; waits for the device."""
        spans = [(r, _num_rows(r), n) for r, n in wanted if n > _num_rows(r)]
        size = self._page_size
        pages = [r.pages[start // size : -(-end // size)] for r, start, end in spans]
        if not pages:
            return
        rows = self._read_pages([page for own in pages for page in own])
        first = 0
        for (request, start, end), own in zip(spans, pages, strict=True):
            skipped = first * size - start // size * size
            new = rows[skipped + start : skipped + end]
            old = [] if request.routed is None else [request.routed]
            request.routed = np.concatenate([*old, new])  # a copy
            first += len(own)

    def _read_pages(self, pages: Sequence[int]) -> np.ndarray:
        """[len(pages) * page_size, num_layers, k], and rows of padding."""
        # All are dispatched before the first is waited for.
        parts = [
            self._run(ProgramCall("read_routed", (ids,)))
            for ids in chunk_ids(pages, self._chunk, self._num_pages)
        ]
        rows = np.concatenate(jax.device_get(parts))[..., : math.prod(self._row_shape)]
        return rows.reshape(-1, *self._row_shape)


def _num_rows(request: Request) -> int:
    return 0 if request.routed is None else len(request.routed)
