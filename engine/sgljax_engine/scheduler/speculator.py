from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from sgljax_engine.config import SpeculationConfig
from sgljax_engine.speculation.drafters import Drafter, End
from sgljax_engine.speculation.plan import TRIAL_STEPS, RowDrafts, StepDrafts
from sgljax_engine.speculation.speeds import Speeds
from sgljax_engine.speculation.texts import MATCHED_TOKENS, RequestText
from sgljax_engine.types import Request, SchedulerOutput, StepOutput


class Speculator:
    """Plans the drafts of an engine, and learns how well they do; a group shares its drafters."""

    def __init__(
        self,
        config: SpeculationConfig,
        drafters: Mapping[str, Drafter],
        row_tokens: Mapping[int, Sequence[int]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._drafters = drafters
        self._drafts_own = "ngram" in config.speculative_drafters
        self._is_measured = config.speculation == "auto"
        self._speeds = {size: Speeds(sizes) for size, sizes in row_tokens.items()}
        self._row_tokens = row_tokens
        self._texts: dict[str, RequestText] = {}
        self._tokens_per_step = 1.0
        self._clock, self._planned_s = clock, 0.0

    # ------------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        text = self._texts[request.rid] = RequestText(request.prompt_ids)
        text.update(request.output_ids)
        _add_sources(request)  # of tokens of a checkpoint
        for drafter in self._drafters.values():
            drafter.add(text)

    def finish(self, request: Request) -> None:
        reason = request.finish
        is_answered = reason is not None and reason.type in ("stop", "length")
        version = request.token_versions[-1] if is_answered and request.output_ids else None
        self._end(request, End(version=version))

    def hand_over(self, request: Request) -> None:
        self._end(request, End(is_moved=True))

    def _end(self, request: Request, end: End) -> None:
        text = self._texts.pop(request.rid)
        text.update(request.output_ids)
        for drafter in self._drafters.values():
            drafter.finish(text, end)

    # ------------------------------------------------------------------ dispatches

    def may_draft(self, requests: Sequence[Request]) -> bool:
        """Whether a dispatch of these rows may have drafts."""
        return 0 < len(requests) <= max(self._row_tokens)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a row, for each step, that get pages."""
        return math.ceil(self._tokens_per_step - 0.05)

    def plan(self, requests: Sequence[Request], num_steps: int) -> StepDrafts | None:
        """The drafts of requests that decode together, for so many steps; None for none."""
        self._planned_s = self._clock()
        if not self.may_draft(requests):
            return None
        size = self._size_of(requests)
        speeds, max_steps = self._speeds[size], num_steps
        tokens = speeds.pick() if self._is_measured else self._row_tokens[size][-1]
        if tokens == 1:
            return None
        if self._is_measured and speeds.is_trial(tokens):
            max_steps = min(num_steps, TRIAL_STEPS)
        return StepDrafts([self._row(request) for request in requests], tokens, max_steps)

    def _size_of(self, requests: Sequence[Request]) -> int:
        return next(size for size in self._row_tokens if size >= len(requests))

    def _row(self, request: Request) -> RowDrafts:
        text = self._texts[request.rid]
        if request.guide is not None:  # only what its grammar foretells can be verified
            forced = request.guide.allowed.drafts
            behind = np.concatenate([text.tokens[-MATCHED_TOKENS:], np.array(forced, np.int32)])
            return RowDrafts((), (behind,) if forced else (), text.tokens, drafts_own=False)

        def references(name: str) -> Sequence[np.ndarray]:
            drafter = self._drafters.get(name)
            return () if drafter is None else drafter.references(text)

        return RowDrafts(
            references("history"), references("siblings"), text.tokens, self._drafts_own
        )

    def learn(self, plan: SchedulerOutput, result: StepOutput) -> None:
        """Takes the tokens of a dispatch, and learns from its time."""
        for request, row in zip(plan.decode, result.rows, strict=True):
            self._texts[request.rid].update(request.output_ids)
            if row.drafts is None:
                _add_sources(request)
            else:
                request.draft_sources.extend(row.drafts.sources)
        counts = [len(row.token_ids) for row in result.rows]
        if not any(counts):
            return
        most = max(counts) / result.num_steps
        self._tokens_per_step += (most - self._tokens_per_step) / 4
        # A row with a grammar takes one step, however many the dispatch has.
        is_typical = all(request.guide is None for request in plan.decode)
        is_typical &= not plan.prefill and not plan.copies and not result.num_cache_misses
        if is_typical and self.may_draft(plan.decode):
            seconds = self._clock() - self._planned_s  # with the work of the host
            tokens = 1 if plan.drafts is None else plan.drafts.row_tokens
            mean = sum(counts) / len(counts)
            self._speeds[self._size_of(plan.decode)].learn(tokens, seconds / mean)


def _add_sources(request: Request) -> None:
    """Notes that the newest tokens were not drafted."""
    count = len(request.output_ids) - len(request.draft_sources)
    request.draft_sources.extend([0] * count)
