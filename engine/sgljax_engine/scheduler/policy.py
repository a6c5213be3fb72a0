"""How many KV tokens admission keeps free, and how much work a dispatch does.

The estimate follows SGLang's `new_token_ratio`: running requests are expected to use that fraction
of the tokens that they may still generate. The fraction decays while no request is retracted, so
the batch grows. After a retraction it jumps up, to avoid a series of retractions.

A dispatch cannot be interrupted, so its work bounds how long a command waits. Each dispatch also
costs host work, so it should not be much shorter than that bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sgljax_engine.config import SchedulerConfig
from sgljax_engine.types import Request, SchedulerOutput, StepOutput

_RETRACT_STEPS = 20
"""Minimum expected need of each running request after a retraction, in tokens, as in SGLang."""

FIRST_STEPS = 8
"""Maximum number of decode steps while the time of a step is unknown."""


class AdmissionPolicy:
    """Estimates the KV demand of running requests. Owned by the scheduler."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.new_token_ratio = config.init_new_token_ratio

    @property
    def init_new_token_ratio(self) -> float:
        return self._config.init_new_token_ratio

    def on_decode(self) -> None:
        """After a successful decode dispatch, lowers the expectation a little."""
        decayed = self.new_token_ratio - self._config.new_token_ratio_decay
        self.new_token_ratio = max(decayed, self._config.min_new_token_ratio)

    def on_retract(self, running: Iterable[Request]) -> None:
        """After pages ran out, raises the expectation at least to what running requests used."""
        used = allowed = 0
        for request in running:
            used += len(request.output_ids) + min(self._config.decode_steps, _RETRACT_STEPS)
            allowed += request.max_new_tokens
        if allowed:
            self.new_token_ratio = max(self.new_token_ratio, min(used / allowed, 1.0))

    def expected_tokens(self, request: Request) -> int:
        """Number of tokens that the request is expected to generate from now on."""
        return math.ceil(self.new_token_ratio * request.num_remaining)


class DispatchPacer:
    """Chooses the prefill tokens and decode steps of a dispatch. Owned by the scheduler.

    It learns the seconds of a prefill token, and of a step for every power of two of rows. It
    allows as much work as fits `max_dispatch_s`, prefill first.
    """

    def __init__(self, config: SchedulerConfig, prefill_sizes: Sequence[int]) -> None:
        self._config = config
        self._prefill_sizes = tuple(prefill_sizes)
        self._step_s: dict[int, float] = {}
        self._rough: set[int] = set()  # keys of `_step_s` measured only beside a prefill
        self._token_s: float | None = None

    def num_steps(self, num_rows: int, prefill_tokens: int = 0) -> int:
        """Number of steps, at least one, for a dispatch with these rows and prefill tokens."""
        step_s = self._find_step_s(num_rows)
        if step_s is None:
            return min(FIRST_STEPS, self._config.decode_steps)
        left_s = self._config.max_dispatch_s - self._prefill_s(prefill_tokens)
        # Compared before the conversion to an integer, since the bound may be infinite.
        return max(int(min(left_s / step_s, self._config.decode_steps)), 1)

    def num_prefill_tokens(self, num_rows: int) -> int:
        """The largest of `prefill_sizes` that leaves time for a decode step."""
        left_s = self._config.max_dispatch_s - (self._find_step_s(num_rows) or 0.0)
        fitting = [size for size in self._prefill_sizes if self._prefill_s(size) <= left_s]
        return max(fitting, default=self._prefill_sizes[0])

    def on_dispatch(self, output: SchedulerOutput, step: StepOutput) -> None:
        num_steps = step.num_steps
        prefilled, num_rows = self._padded(output.prefill_tokens), len(output.decode)
        num_tokens = prefilled + num_steps * num_rows
        if step.dispatch_s is None or not num_tokens:
            return
        token_s = self._token_s or 0.0
        if prefilled:
            self._learn_token_s(step.dispatch_s, prefilled, num_steps, num_rows)
        # In a dispatch that ended early, or took one step beside a prefill, the fixed cost of a
        # dispatch weighs too much.
        is_typical = num_steps >= output.num_steps // 2 and (num_steps > 1 or not prefilled)
        if num_steps and is_typical:
            # A token costs no less in a decode step than in a prefill, so the mean is a lower
            # bound.
            left_s = step.dispatch_s - prefilled * token_s
            least_s = step.dispatch_s / num_tokens * num_rows
            self._learn_step_s(max(left_s / num_steps, least_s), num_rows, prefilled / num_tokens)

    def _learn_token_s(
        self, dispatch_s: float, prefilled: int, num_steps: int, num_rows: int
    ) -> None:
        num_tokens = prefilled + num_steps * num_rows
        token_s = dispatch_s / num_tokens  # an upper bound: see `on_dispatch`
        size = num_rows.bit_length()
        if size in self._step_s and size not in self._rough:
            left_s = max(dispatch_s - num_steps * self._step_s[size], 0.0)
            token_s = min(token_s, left_s / prefilled)
        # Beside many decoded tokens, the time of a prefill is lost in the noise.
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
        """Seconds of a step; those of more rows if this many never ran."""
        size = num_rows.bit_length()
        larger = sorted(known for known in self._step_s if known >= size)
        return self._step_s[larger[0]] if larger else None

    def _prefill_s(self, num_tokens: int) -> float:
        """Expected seconds of a prefill; 0 while nothing is known."""
        return self._padded(num_tokens) * (self._token_s or 0.0)

    def _padded(self, num_tokens: int) -> int:
        if num_tokens == 0:
            return 0
        return next(size for size in self._prefill_sizes if size >= num_tokens)


def _approach(known: float | None, sample: float, weight: float) -> float:
    """Moves half-way from the known value to a sample, or less if its weight is below 1."""
    return sample if known is None else known + (sample - known) * weight / 2
