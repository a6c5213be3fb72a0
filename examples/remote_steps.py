"""What a training run with a remote agent tells about its steps."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteStep:
    """One step of training.

    Attributes:
        step: From 1.
        reward: Mean reward of its episodes.
        turns: Mean turns of the policy in an episode.
        lag: Mean policies between sampling a token and training on it.
        mixed: Share of episodes that more than one policy sampled.
        step_s: Seconds from one weight sync to the next.
    """

    step: int
    reward: float
    turns: float
    lag: float
    mixed: float
    step_s: float


class StepLog:
    """Puts a step's numbers together, on the training thread."""

    def __init__(self, on_step: Callable[[RemoteStep], None]) -> None:
        self.steps: list[RemoteStep] = []
        self._on_step = on_step
        self._batch: dict[str, float] = {}
        self._start_s = time.perf_counter()

    def add_batch(self, episodes: Sequence[dict[str, Any]], lag: float) -> None:
        """Takes what the step trains on."""
        policies = [{v for turn in each["turns"] for v in turn["versions"]} for each in episodes]
        self._batch = {
            "reward": float(np.mean([each["reward"] for each in episodes])),
            "turns": float(np.mean([len(each["turns"]) for each in episodes])),
            "lag": lag,
            "mixed": float(np.mean([len(each) > 1 for each in policies])),
        }

    def end_step(self) -> None:
        """Ends a step; called after each weight sync."""
        start_s, self._start_s = self._start_s, time.perf_counter()
        number, step_s = len(self.steps) + 1, self._start_s - start_s
        self.steps.append(RemoteStep(step=number, step_s=step_s, **self._batch))
        self._on_step(self.steps[-1])
