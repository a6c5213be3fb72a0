"""What an asynchronous training run tells about its steps."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tunix.perf.metrics import MetricsBuffer

from addition_task import exact_match

LAG_METRICS = ("weight_lag/mean", "weight_lag/mixed_fraction")
NUM_COMPILING = 3  # first steps, which compile


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsyncStep:
    """One step of training.

    Attributes:
        step: From 1.
        reward: Mean reward of the completions that it trained on.
        num_tokens: Tokens of those completions, end tokens left out.
        step_s: Seconds from one weight sync to the next.
        wait_s: Those of them in which the trainer waited for completions.
    """

    step: int
    reward: float
    num_tokens: int
    step_s: float
    wait_s: float


class StepClock:
    """Puts together what happens on the training thread: rewards, then a weight sync."""

    def __init__(self, on_step: Callable[[AsyncStep], None]) -> None:
        self.steps: list[AsyncStep] = []
        self.lags: dict[str, list[float]] = {name: [] for name in LAG_METRICS}
        self._on_step = on_step
        self._start_s = time.perf_counter()
        self._wait_s = 0.0
        self._rewards: list[float] = []
        self._num_tokens = 0

    def score(self, prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> Any:
        """The reward function: exact match. Called once a step, when its completions are there."""
        self._wait_s = time.perf_counter() - self._start_s
        self._rewards = exact_match(prompts, completions, columns["answer"])
        self._num_tokens = sum(map(len, completions))  # a token is a character
        return self._rewards

    def add_sync(self) -> None:
        """Ends a step; called after each weight sync."""
        now_s = time.perf_counter()
        step = AsyncStep(
            step=len(self.steps) + 1,
            reward=float(np.mean(self._rewards)),
            num_tokens=self._num_tokens,
            step_s=now_s - self._start_s,
            wait_s=self._wait_s,
        )
        self._start_s = now_s
        self.steps.append(step)
        self._on_step(step)

    def add_metrics(self, metrics: MetricsBuffer) -> None:
        """Takes what Tunix logs."""
        for name in LAG_METRICS:
            if name in metrics.metrics:
                values, _ = metrics.metrics[name]
                self.lags[name].extend(np.asarray(values, np.float64).tolist())


def summarize(clock: StepClock, num_ends: int = 10) -> dict[str, float]:
    """Returns the run in a few numbers: rewards of its ends, medians without the first steps."""
    steps = clock.steps
    warm = steps[NUM_COMPILING:] or steps
    return {
        "first_reward": float(np.mean([step.reward for step in steps[:num_ends]])),
        "last_reward": float(np.mean([step.reward for step in steps[-num_ends:]])),
        "step_s": float(np.median([step.step_s for step in warm])),
        "mean_step_s": float(np.mean([step.step_s for step in warm])),
        "wait_s": float(np.median([step.wait_s for step in warm])),
        "num_tokens": float(np.mean([step.num_tokens for step in warm])),
        **{name: float(np.mean(values or [0.0])) for name, values in clock.lags.items()},
    }
