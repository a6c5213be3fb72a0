"""Decides which dispatches verify drafts, and from which sources. Engine thread only.

The device chooses the width of each step, by numbers from here: the costs of widths, each request's
acceptance so far, and the worth of a token. A new request expects the acceptance of earlier ones.
Long answers decide when a batch ends, so their drafts are worth more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import numpy as np

from sgljax_engine.config import SpeculationConfig
from sgljax_engine.speculation.costs import CostTable, StepCosts
from sgljax_engine.speculation.drafters import Drafter, End
from sgljax_engine.speculation.plan import (
    ACCEPTANCE_KINDS,
    HOPE,
    HOPE_RATE,
    MOST_CERTAIN,
    RowDrafts,
    RowVerified,
)
from sgljax_engine.speculation.texts import RequestText
from sgljax_engine.types import Request, SchedulerOutput, StepOutput

_FIRST_ACCEPTANCE = 0.9
"""Expected acceptance at the start, and in a trial."""

_TRIAL_STEPS, _MAX_TRIAL_STEPS = 1024, 8192
"""Steps without drafts after which they are tried again; twice as many after each vain trial."""

_GOOD_SHARE = 0.25
"""Share of right drafts after which a trial was not in vain."""

_PRIOR_RATE = 0.02
"""How far one draft moves the acceptance that new requests expect towards its request's."""

_RECOVERY_RATE = 0.02
"""How far a request without right drafts moves that back, so that drafts are tried again."""

_TOKENS_PER_DRAFT = 8
"""Tokens without a draft that count as one that was not worth verifying."""

_LIGHTEST, _HEAVIEST = 0.5, 2.0
"""Worth of a token of the shortest and the longest answers, compared with the mean."""


class Speculator:
    """Plans the drafts of an engine, and learns how well they do.

    Attributes:
        costs: Costs of steps, which the runner measures.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        drafters: Mapping[str, Drafter],
        costs: CostTable,
        *,
        sizes: Sequence[int],
        num_drafts: int,
    ) -> None:
        """Starts without requests.

        Args:
            config: Names the drafters.
            drafters: Drafters that keep references, by name; all engines of a group share them.
            costs: Costs of steps.
            sizes: Batch sizes that verify drafts, ascending.
            num_drafts: Most drafts of a row in a step.
        """
        self._drafters = drafters
        self._drafts_own = "ngram" in config.speculative_drafters
        self._num_drafts = num_drafts
        self._acceptance: dict[str, list[float]] = {}
        self._prior = [_FIRST_ACCEPTANCE] * ACCEPTANCE_KINDS
        self._trial_steps = _TRIAL_STEPS
        self._steps_without = 0
        self._tokens_per_step = 1.0
        self._has_given_up = False
        self._planned_s = 0.0
        self.costs = costs
        self._sizes = sizes

    # ------------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        """Adds a request."""
        if request.text is None:
            request.text = RequestText(request.prompt_ids)
        request.text.update(request.output_ids)
        _add_sources(request)  # of tokens of a checkpoint
        self._acceptance[request.rid] = list(self._prior)
        for drafter in self._drafters.values():
            drafter.add(request.text)

    def finish(self, request: Request) -> None:
        """Removes a finished request."""
        reason = request.finish
        is_answered = reason is not None and reason.type in ("stop", "length")
        version = request.token_versions[-1] if is_answered and request.output_ids else None
        self._end(request, End(version=version))
        if request.output_ids and not any(request.draft_sources):
            hoped = ((_FIRST_ACCEPTANCE - each) * _RECOVERY_RATE for each in self._prior)
            self._prior = [each + more for each, more in zip(self._prior, hoped, strict=True)]

    def hand_over(self, request: Request) -> None:
        """Removes a request that goes to another engine."""
        self._end(request, End(is_moved=True))

    def _end(self, request: Request, end: End) -> None:
        text = _text(request)
        text.update(request.output_ids)
        del self._acceptance[request.rid]
        for drafter in self._drafters.values():
            drafter.finish(text, end)

    # ------------------------------------------------------------------ dispatches

    def may_draft(self, requests: Sequence[Request]) -> bool:
        """Whether a dispatch of these rows may have drafts."""
        return 0 < len(requests) <= self._sizes[-1] and not self._has_given_up

    def take_costs(self, size: int, costs: StepCosts) -> None:
        """Takes costs that were measured after a dispatch of this size was planned."""
        self.costs.put(size, costs)
        self._planned_s = time.perf_counter()

    def give_up(self) -> None:
        """Plans no more drafts."""
        self._has_given_up = True

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a row, for each step, that get pages."""
        return math.ceil(self._tokens_per_step - 0.05)

    def plan(self, requests: Sequence[Request]) -> list[RowDrafts] | None:
        """The draft sources of each request; None if drafts do not pay.

        Args:
            requests: Requests that decode together.
        """
        self._planned_s = time.perf_counter()
        if not self.may_draft(requests):
            return None
        if self._steps_without >= self._trial_steps:
            self._begin_trial(requests)
        if not self._may_pay(requests):
            return None
        lengths = np.asarray([len(request.output_ids) + 1 for request in requests], np.float64)
        weights = np.clip(lengths / lengths.mean(), _LIGHTEST, _HEAVIEST)
        return [self._row(*pair) for pair in zip(requests, weights.tolist(), strict=True)]

    def _begin_trial(self, requests: Sequence[Request]) -> None:
        self._trial_steps = min(2 * self._trial_steps, _MAX_TRIAL_STEPS)
        self._steps_without = 0
        for request in requests:
            known = self._acceptance[request.rid]
            self._acceptance[request.rid] = [max(each, _FIRST_ACCEPTANCE) for each in known]

    def _may_pay(self, requests: Sequence[Request]) -> bool:
        """Whether the program with drafts may be the faster one."""
        costs = self.costs.get(self._size_of(requests))
        if costs is None:
            return True
        likely = max(max(self._acceptance[request.rid]) for request in requests)
        return costs.may_pay(len(requests), min(likely, MOST_CERTAIN), self._num_drafts)

    def _size_of(self, requests: Sequence[Request]) -> int:
        return next(size for size in self._sizes if size >= len(requests))

    def saved_s(self, plan: SchedulerOutput, result: StepOutput) -> float:
        """Seconds that drafts saved in a dispatch, by the costs."""
        costs = None if result.passes is None else self.costs.get(self._size_of(plan.decode))
        if costs is None or result.dispatch_s is None or plan.prefill:
            return 0.0
        most = max(len(row.token_ids) for row in result.rows)
        return most * costs.plain - result.dispatch_s

    def _row(self, request: Request, weight: float) -> RowDrafts:
        text = _text(request)

        def references(name: str) -> Sequence[np.ndarray]:
            drafter = self._drafters.get(name)
            return () if drafter is None else drafter.references(text)

        return RowDrafts(
            history=references("history"),
            siblings=references("siblings"),
            own=text.tokens,
            drafts_own=self._drafts_own,
            acceptance=self._acceptance[request.rid],
            weight=weight,
        )

    def learn(self, plan: SchedulerOutput, result: StepOutput) -> None:
        """Takes the tokens of a dispatch, and learns from its drafts."""
        num_drafted = num_right = 0
        for request, row in zip(plan.decode, result.rows, strict=True):
            _text(request).update(request.output_ids)
            if row.drafts is None:
                _add_sources(request)
                self._hope(request, len(row.token_ids))
            else:
                request.draft_sources.extend(row.drafts.sources)
                num_drafted += sum(row.drafts.num_drafted)
                num_right += sum(row.drafts.num_right)
                self._learn(request, row.drafts)
        is_typical = not plan.prefill and not plan.copies and result.dispatch_s is not None
        if is_typical and self.may_draft(plan.decode):
            seconds = time.perf_counter() - self._planned_s  # with the work of the host
            size = self._size_of(plan.decode)
            self.costs.learn(size, result.passes, result.num_steps, seconds)
        if result.num_steps:
            most = max(len(row.token_ids) for row in result.rows) / result.num_steps
            self._tokens_per_step += (most - self._tokens_per_step) / 4
        if num_drafted:
            self._steps_without = 0
        elif self.may_draft(plan.decode):
            self._steps_without += result.num_steps
        if num_right > _GOOD_SHARE * num_drafted:
            self._trial_steps = _TRIAL_STEPS

    def _learn(self, request: Request, verified: RowVerified) -> None:
        self._acceptance[request.rid] = verified.acceptance
        # Where nothing is found, nothing is drafted, and that counts too.
        evidence = max(sum(verified.num_drafted), len(verified.sources) / _TOKENS_PER_DRAFT)
        rate = 1 - (1 - _PRIOR_RATE) ** evidence
        pairs = zip(self._prior, verified.acceptance, strict=True)
        self._prior = [old + rate * (new - old) for old, new in pairs]

    def _hope(self, request: Request, num_tokens: int) -> None:
        """Raises the acceptance of untried kinds, as the device does in steps without drafts."""
        rate = 1 - (1 - HOPE_RATE) ** num_tokens
        known = self._acceptance[request.rid]
        self._acceptance[request.rid] = [each + rate * max(HOPE - each, 0) for each in known]


def _add_sources(request: Request) -> None:
    """Notes that the newest tokens were not drafted."""
    count = len(request.output_ids) - len(request.draft_sources)
    request.draft_sources.extend([0] * count)


def _text(request: Request) -> RequestText:
    assert request.text is not None, request.rid
    return request.text
