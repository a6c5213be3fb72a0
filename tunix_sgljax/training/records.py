"""Records of a run's steps, combined from the rollout and from Tunix's metrics."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from tunix.perf.metrics import MetricsBuffer

from tunix_sgljax.training.report import EvalRecord, StepRecord
from tunix_sgljax.training.rollouts import RolloutTiming

_REWARD = "rewards/score/mean"


class StepRecorder:
    """Makes a record of each step of Tunix's learner. Made on the thread that will call `train`.

    Attributes:
        records: Records of the steps, in order.
        evals: Records of the evaluations between them.
    """

    def __init__(
        self,
        on_step: Callable[[StepRecord], None],
        on_eval: Callable[[EvalRecord], None] = lambda record: None,
        *,
        first_step: int = 1,
    ) -> None:
        self.records: list[StepRecord] = []
        self.evals: list[EvalRecord] = []
        self._on_step = on_step
        self._on_eval = on_eval
        self._first_step = first_step
        self._timings: list[RolloutTiming] = []
        self._step_start_s = time.perf_counter()
        self._thread = threading.get_ident()

    def add_rollout(self, timing: RolloutTiming) -> None:
        """Takes the timing of one call of `generate`; Tunix evaluates on the training thread."""
        if threading.get_ident() != self._thread:
            self._timings.append(timing)

    def add_metrics(self, metrics: MetricsBuffer) -> None:
        """Takes Tunix's metrics at the end of each step; at the very end, an empty buffer."""
        if _REWARD not in metrics.metrics:
            return
        rewards, _ = metrics.metrics[_REWARD]
        reward = float(np.mean(np.asarray(rewards, np.float64)))
        if metrics.mode == "eval":
            self.evals.append(EvalRecord(num_steps=metrics.global_steps, reward=reward))
            self._on_eval(self.evals[-1])
            return
        now_s = time.perf_counter()
        record = StepRecord(
            step=self._first_step + len(self.records),
            reward=reward,
            rollout_s=sum(timing.seconds for timing in self._timings),
            num_tokens=sum(timing.num_tokens for timing in self._timings),
            step_s=now_s - self._step_start_s,
            weight_version=self._timings[-1].weight_version,
        )
        self._timings.clear()
        self._step_start_s = now_s
        self.records.append(record)
        self._on_step(record)

    def start(self, first_step: int) -> None:
        """Starts the clock; a resumed run continues the step count of its checkpoint."""
        self._first_step = first_step
        self._step_start_s = time.perf_counter()


def settings_of(config: Any, device: str) -> dict[str, Any]:
    """The settings of a run for records.json."""
    return {"device": device, **dataclasses.asdict(config)}
