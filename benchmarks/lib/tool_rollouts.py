"""The rollouts of `examples/grpo_tools.py`, with engine options that the example does not have."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.lib.drafted_rollout import DraftedRollout
from benchmarks.lib.reporting import ROOT

sys.path.insert(0, str(ROOT / "examples"))
import grpo_tools
from tunix_sgljax.observability.observers import RolloutTotals

NUM_COMPILING = 2
"""First steps, which compile."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolRollouts:
    """Some steps of the example.

    Attributes:
        speculation: The engine option.
        num_episodes: Episodes of a step, which are played together.
        rewards: Mean reward of each step.
        rollouts: Of each step without those that compile.
    """

    speculation: str
    num_episodes: int
    rewards: list[float]
    rollouts: list[DraftedRollout]

    @property
    def tokens_per_s(self) -> float:
        """Median speed of the rollouts."""
        return float(np.median([each.num_tokens / each.seconds for each in self.rollouts]))


def run_tools(speculation: str, num_prompts: int, num_steps: int) -> ToolRollouts:
    """Trains some steps after those that compile.

    Args:
        speculation: The engine option.
        num_prompts: Prompts of a step.
        num_steps: Steps to measure.
    """
    workers: list[grpo_tools.CountingRollout] = []
    totals: list[RolloutTotals] = []

    class OptionedRollout(grpo_tools.CountingRollout):
        """The example's worker with one more engine option."""

        def __init__(self, *, options: dict[str, Any], **arguments: Any) -> None:
            super().__init__(options={**options, "speculation": speculation}, **arguments)
            workers.append(self)

    settings = grpo_tools.load_settings(ROOT / "configs/grpo_tools.yaml")
    settings.steps = NUM_COMPILING + num_steps
    settings.grpo.prompts_per_step = num_prompts
    counter = grpo_tools.StepCounter(lambda step: totals.append(workers[0].observers.totals()))
    with mock.patch.object(grpo_tools, "CountingRollout", OptionedRollout):
        grpo_tools.train(settings, counter)
    totals = totals[NUM_COMPILING - 1 :]
    return ToolRollouts(
        speculation=speculation,
        num_episodes=num_prompts * settings.grpo.num_generations,
        rewards=[step.reward for step in counter.steps],
        rollouts=[DraftedRollout.between(*pair) for pair in itertools.pairwise(totals)],
    )
