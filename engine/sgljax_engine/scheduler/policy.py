"""How many KV tokens admission keeps free, and how much a dispatch does.

The estimate of what running requests need follows SGLang's `new_token_ratio`: they are expected to
use a fraction of the tokens they may still generate. The fraction decays while all goes well, so
the batch grows, and jumps up after a retraction, so that retractions do not come in series.

A dispatch cannot be interrupted, so its prefill and decode steps bound how long a command waits;
and each dispatch costs host work, so it should not be much shorter than that bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sgljax_engine.config import SchedulerConfig
from sgljax_engine.types import Request, SchedulerOutput, StepOutput

_RETRACT_STEPS = 20
"""Tokens that a retraction expects each running request to need at least, as in SGLang."""

FIRST_STEPS = 8
"""Decode steps at most while it is not known how long a step takes."""


class AdmissionPolicy:
    """Estimates the KV demand of running requests. Owned by the scheduler."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Starts at `config.init_new_token_ratio`."""
        self._config = config
        self.new_token_ratio = config.init_new_token_ratio

    def on_decode(self) -> None:
        """A decode dispatch went well: expect a little less."""
        decayed = self.new_token_ratio - self._config.new_token_ratio_decay
        self.new_token_ratio = max(decayed, self._config.min_new_token_ratio)

    def on_retract(self, running: Iterable[Request]) -> None:
        """Pages ran out: expect at least what the running requests have used so far."""
        used = allowed = 0
        for request in running:
            used += len(request.output_ids) + min(self._config.decode_steps, _RETRACT_STEPS)
            allowed += request.params.max_new_tokens
        if allowed:
            self.new_token_ratio = max(self.new_token_ratio, min(used / allowed, 1.0))

    def expected_tokens(self, request: Request) -> int:
        """Tokens that the request is expected to generate from now on."""
        return math.ceil(self.new_token_ratio * request.num_remaining)


class DispatchPacer:
    """Chooses the prefill tokens and decode steps of a dispatch. Owned by the scheduler.

    It learns the seconds that a step takes, apart for every power of two of rows, and those of a
    prefill token, and allows as much as fits `max_dispatch_s`, prefill first.
    """

    def __init__(self, config: SchedulerConfig, prefill_sizes: Sequence[int]) -> None:
        """Knows nothing yet.

        Args:
            config: Its `max_dispatch_s` and `decode_steps`.
            prefill_sizes: Tokens that a prefill costs the time of, ascending: any prefill costs as
                much as the smallest of these that holds it.
        """
        self._config = config
        self._prefill_sizes = tuple(prefill_sizes)
        self._step_s: dict[int, float] = {}
        self._rough: set[int] = set()  # those of `_step_s` that only had a prefill beside them
        self._token_s: float | None = None

    def num_steps(self, num_rows: int, prefill_tokens: int = 0) -> int:
        """Steps of a dispatch of so many rows, at least one, after so many tokens of prefill."""
        step_s = self._find_step_s(num_rows)
        if step_s is None:
            return min(FIRST_STEPS, self._config.decode_steps)
        left_s = self._config.max_dispatch_s - self._prefill_s(prefill_tokens)
        # Compared before it is made an integer: the bound may be infinite.
        return max(int(min(left_s / step_s, self._config.decode_steps)), 1)

    def num_prefill_tokens(self, num_rows: int) -> int:
        """Prefill tokens that leave time for a step of so many rows: one of `prefill_sizes`."""
        left_s = self._config.max_dispatch_s - (self._find_step_s(num_rows) or 0.0)
        fitting = [size for size in self._prefill_sizes if self._prefill_s(size) <= left_s]
        return max(fitting, default=self._prefill_sizes[0])

    def on_dispatch(self, output: SchedulerOutput, step: StepOutput) -> None:
        """Learns from what a dispatch took."""
        num_steps = max((len(row.token_ids) for row in step.rows), default=0)
        prefilled, num_rows = self._padded(output.prefill_tokens), len(output.decode)
        num_tokens = prefilled + num_steps * num_rows
        if step.dispatch_s is None or not num_tokens:
            return
        token_s = self._token_s or 0.0
        if prefilled:
            self._learn_token_s(step.dispatch_s, prefilled, num_steps, num_rows)
        # Of a dispatch that ended early, or takes one step beside a prefill, what any dispatch
        # costs weighs too much.
        is_typical = num_steps >= output.num_steps // 2 and (num_steps > 1 or not prefilled)
        if num_steps and is_typical:
            # A token costs no less in a decode step than in a prefill: the mean is the least.
            left_s = step.dispatch_s - prefilled * token_s
            least_s = step.dispatch_s / num_tokens * num_rows
            self._learn_step_s(max(left_s / num_steps, least_s), num_rows, prefilled / num_tokens)

    def _learn_token_s(
        self, dispatch_s: float, prefilled: int, num_steps: int, num_rows: int
    ) -> None:
        num_tokens = prefilled + num_steps * num_rows
        token_s = dispatch_s / num_tokens  # the most: see `on_dispatch`
        size = num_rows.bit_length()
        if size in self._step_s and size not in self._rough:
            left_s = max(dispatch_s - num_steps * self._step_s[size], 0.0)
            token_s = min(token_s, left_s / prefilled)
        # Beside many decoded tokens, what a prefill takes is lost in the noise.
        self._token_s = _approach(self._token_s, token_s, prefilled / num_tokens)

    def _learn_step_s(self, step_s: float, num_rows: int, prefill_share: float) -> None:
        size = num_rows.bit_length()
        known = self._step_s.get(size)
        if prefill_share and known is None:
            self._rough.add(size)
        elif not prefill_share and size in self._rough:
            self._rough.remove(size)
            known = None
        self._step_s[size] = _approach(known, step_s, 1 - prefill_share)

    def _find_step_s(self, num_rows: int) -> float | None:
        """Seconds of a step; if so many rows never ran, what more rows took."""
        size = num_rows.bit_length()
        larger = sorted(known for known in self._step_s if known >= size)
        return self._step_s[larger[0]] if larger else None

    def _prefill_s(self, num_tokens: int) -> float:
        """Seconds that a prefill is expected to take; 0 as long as nothing is known."""
        return self._padded(num_tokens) * (self._token_s or 0.0)

    def _padded(self, num_tokens: int) -> int:
        if num_tokens == 0:
            return 0
        return next(size for size in self._prefill_sizes if size >= num_tokens)


def _approach(known: float | None, sample: float, weight: float) -> float:
    """Half-way from what is known to a sample, or less if it weighs less than 1."""
    return sample if known is None else known + (sample - known) * weight / 2
