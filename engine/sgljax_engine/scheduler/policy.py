"""How many KV tokens admission keeps free, and how many decode steps a dispatch takes.

The estimate of what running requests need follows SGLang's `new_token_ratio`: they are expected to
use a fraction of the tokens they may still generate. The fraction decays while all goes well, so
the batch grows, and jumps up after a retraction, so that retractions do not come in series.

A dispatch cannot be interrupted, so its steps bound how long a command waits; and each dispatch
costs host work, so it should not be much shorter than that bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

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
    """Chooses the decode steps of a dispatch. Owned by the scheduler.

    It learns the seconds that a step takes, apart for every power of two of rows, and allows as
    many steps as fit `max_dispatch_s`, up to `decode_steps`.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        """Knows nothing yet."""
        self._config = config
        self._step_s: dict[int, float] = {}

    def num_steps(self, num_rows: int) -> int:
        """Steps of a dispatch of so many rows, at least one."""
        step_s = self._step_s.get(num_rows.bit_length())
        if step_s is None:
            return min(FIRST_STEPS, self._config.decode_steps)
        # Compared before it is made an integer: the bound may be infinite.
        steps = min(self._config.max_dispatch_s / step_s, self._config.decode_steps)
        return max(int(steps), 1)

    def on_decode(self, output: SchedulerOutput, step: StepOutput) -> None:
        """Learns from a dispatch that decoded."""
        if step.decode_s is None:
            return
        num_steps = max(len(row.token_ids) for row in step.rows)
        if num_steps < output.num_steps // 2:
            return  # ended early, so what a dispatch costs whatever its steps weighs too much
        size, step_s = len(output.decode).bit_length(), step.decode_s / num_steps
        known = self._step_s.get(size, step_s)
        # With a prefill in it the time is only an upper bound.
        self._step_s[size] = min(known, step_s) if output.prefill else (known + step_s) / 2
