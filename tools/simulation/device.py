"""A device that only takes time: it runs the scheduler's plans over a table of step times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sgljax_engine.types import Request, RowOutput, SchedulerOutput, StepOutput, StepTimes
from tools.simulation.hardware import StepTable


class DispatchUse(NamedTuple):
    """What a dispatch did with its time.

    Attributes:
        seconds: Its time.
        row_s: Seconds of rows with a request, the sum over rows.
    """

    seconds: float
    row_s: float


class SimulatedDevice:
    """Answers each request with as many tokens as its length says.

    A dispatch ends early as the decode program does: when as many rows have finished as the
    scheduler said, or as let the rest fit a smaller program.

    Attributes:
        now_s: The clock.
        last: What the last dispatch did.
        version: Of the weights.
    """

    def __init__(self, table: StepTable) -> None:
        """Starts at 0 seconds.

        Args:
            table: Step times.
        """
        self._table = table
        self._lengths: dict[str, int] = {}
        self.now_s = 0.0
        self.last = DispatchUse(0.0, 0.0)
        self.version = 0

    def expect(self, request: Request, num_tokens: int) -> None:
        """Sets the length of a request's answer."""
        self._lengths[request.rid] = num_tokens

    def forget(self, request: Request) -> None:
        """Forgets a finished request."""
        del self._lengths[request.rid]

    def run(self, plan: SchedulerOutput) -> StepOutput:
        """Runs a dispatch, and moves the clock."""
        lefts = [self._lengths[r.rid] - len(r.output_ids) for r in plan.decode]
        num_steps = self._num_steps(plan, lefts)
        rows, num_keys, num_row_steps = [], 0, 0
        for request, left, limit in zip(plan.decode, lefts, plan.step_limits, strict=True):
            count = min(num_steps, left, limit)
            num_row_steps += count
            num_keys += count * request.kv_len + count * (count + 1) // 2
            rows.append(_row(count, stopped=count == left))
        step_s = self._table.seconds(len(rows)) if rows else 0.0
        prefill_s = plan.prefill_tokens * self._table.prefill_token_s + self._table.dispatch_s
        decode_s = num_steps * step_s + num_keys * self._table.key_s
        share = num_row_steps / (num_steps * len(rows)) if num_row_steps else 0.0
        self.last = DispatchUse(prefill_s + decode_s, len(rows) * (prefill_s + share * decode_s))
        start_s, self.now_s = self.now_s, self.now_s + self.last.seconds
        times = StepTimes(start_s, start_s, start_s + prefill_s, self.now_s)
        return StepOutput(rows, weight_version=self.version, times=times)

    def _num_steps(self, plan: SchedulerOutput, lefts: Sequence[int]) -> int:
        """Steps until the dispatch ends."""
        if not lefts:
            return 0
        ends = [
            left if left <= limit else limit if limit == r.num_remaining else None
            for r, left, limit in zip(plan.decode, lefts, plan.step_limits, strict=True)
        ]
        finishes = sorted(end for end in ends if end is not None)
        smaller = self._table.smaller(len(lefts))
        most = plan.max_finished or (len(lefts) - smaller if smaller else len(lefts) + 1)
        longest = max(map(min, zip(lefts, plan.step_limits, strict=True)))
        num_steps = min(plan.num_steps, longest)
        return min(num_steps, finishes[most - 1]) if len(finishes) >= most else num_steps


def _row(count: int, *, stopped: bool) -> RowOutput:
    zeros = [0.0] * count
    return RowOutput([0] * count, zeros, zeros, zeros, stopped)
