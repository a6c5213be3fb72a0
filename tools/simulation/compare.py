"""Ways to run a step, compared with first come, first served."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from sgljax_engine.checks import check_count
from tools.simulation.hardware import StepTable
from tools.simulation.steps import Plan, Simulation
from tools.simulation.workload import Lengths

_LONGEST = {"schedule_policy": "longest_first"}

WAYS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "first come": {},
        "longest first": _LONGEST,
        "1.25 times, drop": {**_LONGEST, "over_sampling": 1.25, "unfinished": "drop"},
        "1.5 times, drop": {**_LONGEST, "over_sampling": 1.5, "unfinished": "drop"},
        "1.25 times, carry": {**_LONGEST, "over_sampling": 1.25},
        "1.5 times, carry": {**_LONGEST, "over_sampling": 1.5},
    }
)
"""Changes of a `Plan`, by name; the first is what the others are compared with."""

_SKIPPED_STEPS = 2
"""Steps that do not count: the first ones carry nothing yet."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The steps of one way, on average.

    Attributes:
        name: In `WAYS`.
        step_s: Seconds of a step's rollout.
        speed: Steps in the time of one step of the first way.
        error: Standard error of the speed, from steps in pairs; 0 of a single step.
        idle: Share of rows' seconds without a request.
        tail_s: Seconds of a step after the last start of a request.
        mean_length: Tokens of a sample that is trained on.
        num_carried: Groups that go on in the next step.
        dropped: Share of sampled tokens that nobody trains on.
    """

    name: str
    step_s: float
    speed: float
    error: float
    idle: float
    tail_s: float
    mean_length: float
    num_carried: float
    dropped: float


def compare_ways(
    plan: Plan, lengths: Lengths, table: StepTable, num_steps: int
) -> Iterator[Outcome]:
    """Simulates every way, one after another.

    Args:
        plan: What the ways change.
        lengths: Lengths of answers.
        table: Step times.
        num_steps: Steps that count, of each way.

    Raises:
        InvalidConfigError: for a number of steps below 1.
    """
    check_count("num_steps", num_steps)
    base_s: list[float] = []
    for name, changes in WAYS.items():
        simulation = Simulation(dataclasses.replace(plan, **changes), lengths, table)
        steps = list(
            itertools.islice(simulation.steps(_SKIPPED_STEPS + num_steps), _SKIPPED_STEPS, None)
        )
        seconds = [step.seconds for step in steps]
        step_s = statistics.fmean(seconds)
        mean_length = statistics.fmean(step.mean_length for step in steps)
        dropped = statistics.fmean(step.num_dropped_tokens for step in steps)
        trained = mean_length * plan.num_groups * plan.num_samples
        base_s = base_s or seconds
        speed = statistics.fmean(base_s) / step_s
        yield Outcome(
            name=name,
            step_s=step_s,
            speed=speed,
            error=_error(speed, base_s, seconds),
            idle=statistics.fmean(step.idle for step in steps),
            tail_s=statistics.fmean(step.tail_s for step in steps),
            mean_length=mean_length,
            num_carried=statistics.fmean(step.num_carried for step in steps),
            dropped=dropped / (dropped + trained),
        )


def _error(speed: float, base_s: Sequence[float], seconds: Sequence[float]) -> float:
    """The standard error of a ratio of means, whose steps are pairs of the same answers."""
    if len(seconds) < 2:
        return 0.0
    differences = [base - speed * own for base, own in zip(base_s, seconds, strict=True)]
    scale = statistics.fmean(seconds) * math.sqrt(len(seconds))
    return statistics.stdev(differences) / scale
