"""Reports of a training run: a record and a line for each step, and records.json."""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm
from tunix.perf.metrics import MetricsBuffer

from tunix_sgljax.training.schema import TrainConfig

logger = logging.getLogger(__name__)

WINDOW = 10
"""Steps over which rewards are averaged."""

_REWARD = "rewards/score/mean"
_GROUPS = ("carried_groups", "dropped_groups", "aborted_groups", "ended_groups")
_TAIL = {name: f"over_sampling/{name}" for name in (*_GROUPS, "age_mean", "age_max", "wait_s")}
_TAIL["tail_s"] = "rollout/tail_s"
"""Fields of a record's `over_sampling`, and Tunix's metrics that they come from."""


class StepRecord(NamedTuple):
    """One step of training, from 1.

    `rollout_s` and `num_tokens` are of `generate`; `step_s` is the whole step. `weight_version`
    sampled the step's last mini-batch, if the engine counts them. `over_sampling` has groups that
    were left, ages of tokens and seconds of the tail, by the names of their metrics.
    """

    step: int
    reward: float
    rollout_s: float
    num_tokens: int
    step_s: float
    weight_version: int | None
    over_sampling: dict[str, float] | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.rollout_s


class EvalRecord(NamedTuple):
    """The mean reward of completions of held-out prompts, after so many steps of training."""

    num_steps: int
    reward: float


class StepRecorder:
    """Makes a record of each step of Tunix's learner. Made on the thread that will call `train`."""

    def __init__(
        self,
        on_step: Callable[[StepRecord], None],
        on_eval: Callable[[EvalRecord], None] = lambda record: None,
    ) -> None:
        self.records: list[StepRecord] = []
        self.evals: list[EvalRecord] = []
        self._on_step = on_step
        self._on_eval = on_eval
        self._thread = threading.get_ident()
        self._weight_version: int | None = None
        self.start(1)

    def start(self, first_step: int) -> None:
        self._first_step = first_step
        self._start_step()

    def _start_step(self) -> None:
        self._rollout_s, self._num_tokens = 0.0, 0
        self._step_start_s = time.perf_counter()

    def add_rollout(self, seconds: float, num_tokens: int, weight_version: int | None) -> None:
        """Takes one call of `generate`; Tunix evaluates on the training thread."""
        if threading.get_ident() != self._thread:
            self._rollout_s += seconds
            self._num_tokens += num_tokens
            self._weight_version = weight_version

    def add_metrics(self, metrics: MetricsBuffer) -> None:
        """Takes Tunix's metrics at the end of each step; at the very end, an empty buffer."""
        if _REWARD not in metrics.metrics:
            return
        reward = float(np.mean(np.asarray(metrics.metrics[_REWARD][0], np.float64)))
        if metrics.mode == "eval":
            self.evals.append(EvalRecord(metrics.global_steps, reward))
            self._on_eval(self.evals[-1])
            return
        tail = _tail_of(metrics)
        record = StepRecord(
            step=self._first_step + len(self.records),
            reward=reward,
            rollout_s=self._rollout_s + (tail or {}).get("wait_s", 0.0),
            num_tokens=self._num_tokens,
            step_s=time.perf_counter() - self._step_start_s,
            weight_version=self._weight_version,
            over_sampling=tail,
        )
        self._start_step()
        self.records.append(record)
        self._on_step(record)


def _tail_of(metrics: MetricsBuffer) -> dict[str, float] | None:
    if _TAIL["wait_s"] not in metrics.metrics:
        return None
    tail = {}
    for name, key in _TAIL.items():
        if key in metrics.metrics:
            values, reduce = metrics.metrics[key]
            numbers = np.asarray(values, np.float64)
            tail[name] = np.asarray((reduce or np.mean)(numbers)).item()
    return tail


class StepLines:
    """Writes a line about each finished step: its seconds, the rollout's, and the time left."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._warm_s: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._is_first = True

    def __call__(self, record: StepRecord) -> None:
        if not self._is_first:  # the first one compiles
            self._warm_s.append(record.step_s)
        self._is_first = False
        num_steps, num_left = self._num_steps, self._num_steps - record.step
        weights = "-" if record.weight_version is None else record.weight_version
        left = ""
        if self._warm_s and num_left > 0:
            left = f"  {describe_time(num_left * statistics.median(self._warm_s))} left"
        print_line(
            f"step {record.step:>{len(str(num_steps))}}/{num_steps}  reward {record.reward:.3f}  "
            f"{record.step_s:.2f} s, rollout {record.rollout_s:.2f} s at "
            f"{record.tokens_per_s:.0f} tokens/s  weights {weights}{left}"
            f"{_describe_tail(record.over_sampling)}"
        )


def _describe_tail(tail: dict[str, float] | None) -> str:
    """The end of a step's line: only what there is."""
    if tail is None:
        return ""
    counts = {name.removesuffix("_groups"): tail[name] for name in _GROUPS}
    words = [f"{count:.0f} groups {name}" for name, count in counts.items() if count]
    words += [f"tokens {tail['age_mean']:.2f} old, at most {tail['age_max']:.0f}"]
    words += [f"tail {tail['tail_s']:.2f} s"] if "tail_s" in tail else []
    return "  " + ", ".join(words)


def describe_time(seconds: float) -> str:
    """Seconds in the unit that a reader would use: "40 s", "12 min" or "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def print_eval(record: EvalRecord) -> None:
    print_line(f"held out, after {record.num_steps} steps: reward {record.reward:.3f}")


def print_line(line: str) -> None:
    """Writes a line to stdout, at once, above the bars of a rollout."""
    encoding = sys.stdout.encoding or "utf-8"  # texts of a model may not fit
    tqdm.write(line.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


def summarize(records: Sequence[StepRecord]) -> dict[str, float]:
    """Returns a run of at least one step in a few numbers.

    Rewards are means of the first and last steps, at most `WINDOW`; `rollout_s`, `tokens_per_s` and
    `step_s` are medians without the first step, which compiles.
    """
    warm = records[1:] or records
    first, last = (_mean_reward(steps) for steps in (records[:WINDOW], records[-WINDOW:]))
    return {
        "first_reward": first,
        "last_reward": last,
        **{
            name: float(np.median([getattr(record, name) for record in warm]))
            for name in ("rollout_s", "tokens_per_s", "step_s")
        },
        "total_s": sum(record.step_s for record in records),
        "gain": last - first,
    }


def _mean_reward(records: Sequence[StepRecord]) -> float:
    return float(np.mean([record.reward for record in records]))


def format_summary(records: Sequence[StepRecord]) -> str:
    """The run in one line; without a gain where the first steps are the last ones too."""
    summary, num = summarize(records), len(records)
    if num < 2 * WINDOW:
        return f"mean reward {_mean_reward(records):.3f} in {num} step{'s' if num > 1 else ''}"
    return (
        f"mean reward first {WINDOW} steps {summary['first_reward']:.3f}, "
        f"last {WINDOW} steps {summary['last_reward']:.3f}, gain {summary['gain']:+.3f}"
    )


def write_json(
    path: Path,
    config: TrainConfig,
    records: Sequence[StepRecord],
    evals: Sequence[EvalRecord] = (),
) -> None:
    content: dict[str, Any] = {
        "settings": {"device": jax.devices()[0].device_kind, **dataclasses.asdict(config)},
        "summary": summarize(records),
        "steps": [record._asdict() for record in records],
        "evaluations": [record._asdict() for record in evals],
    }
    write_whole(path, content)


class RecordFile:
    """records.json of a run, written after every step: a run that is killed leaves it.

    A resumed run keeps the records of the steps that its checkpoint holds.
    """

    def __init__(self, path: Path, config: TrainConfig, num_done: int) -> None:
        self.path = path
        self._config = config
        self._steps, self._evals = _earlier_records(path, num_done)

    def write(self, records: Sequence[StepRecord], evals: Sequence[EvalRecord]) -> None:
        """Writes the records of this run behind the earlier ones."""
        again = {record.num_steps for record in evals}
        before = [record for record in self._evals if record.num_steps not in again]
        write_json(self.path, self._config, [*self._steps, *records], [*before, *evals])

    def update(self, records: Sequence[StepRecord], evals: Sequence[EvalRecord]) -> None:
        """`write` between two steps, which go on where it fails; a warning says so."""
        try:
            self.write(records, evals)
        except OSError as error:
            logger.warning("%s is not up to date, and the run goes on: %s", self.path, error)


def _earlier_records(path: Path, num_done: int) -> tuple[list[StepRecord], list[EvalRecord]]:
    if not num_done or not path.exists():
        return [], []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        steps = [StepRecord(**each) for each in content["steps"]]
        evals = [EvalRecord(**each) for each in content["evaluations"]]
        return (
            [record for record in steps if record.step <= num_done],
            [record for record in evals if record.num_steps <= num_done],
        )
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("%s holds no records that could be kept: %r", path, error)
        return [], []


def write_whole(path: Path, content: Mapping[str, Any]) -> None:
    """Writes JSON; an older file stays whole, and stays if the disk is full."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.partial")
    try:
        beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
