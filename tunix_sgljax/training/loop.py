"""A training run from its config: load, train, evaluate, write."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tunix.rl.rl_cluster import Mode, RLCluster
from tunix.rl.rl_learner import TrainingInputT

from sgljax_engine import InvalidConfigError
from tunix_sgljax.observability.progress import Progress
from tunix_sgljax.observability.rollout_metrics import log_rollout_metrics
from tunix_sgljax.observability.timeline import Timeline
from tunix_sgljax.training.checks import updates_per_step
from tunix_sgljax.training.cluster import (
    close_rollout,
    make_cluster,
    make_learner,
    make_meshes,
    make_optimizers,
    rollout_engine,
)
from tunix_sgljax.training.memory import MemoryEstimate, estimate_memory
from tunix_sgljax.training.models import ModelSpec, find_model
from tunix_sgljax.training.records import StepRecorder, settings_of
from tunix_sgljax.training.report import EvalRecord, StepRecord, write_json, write_plot
from tunix_sgljax.training.resuming import check_resume, keep_lora_settings
from tunix_sgljax.training.rollouts import TimedRollout, weight_version_of
from tunix_sgljax.training.schema import TrainConfig
from tunix_sgljax.training.task import Task, batches, load_task, to_batch
from tunix_sgljax.training.tokenizers import load_tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a run.

    Attributes:
        records: Records of its steps; none if a checkpoint held all of them already.
        evals: Evaluations between the steps, and a last one at the end.
        resumed_from: Number of steps in the checkpoint.
        was_stopped: Whether `should_stop` ended it early.
        files: Files that it wrote.
    """

    records: list[StepRecord]
    evals: list[EvalRecord]
    resumed_from: int
    was_stopped: bool
    files: list[Path]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimelineSteps:
    """Steps to record.

    Attributes:
        path: Path of the file, for the Perfetto UI.
        skipped_steps: Steps of this run before the first recorded one; the first steps compile.
        num_steps: Number of steps to record.
    """

    path: Path
    skipped_steps: int = 1
    num_steps: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run before its weights are loaded.

    Attributes:
        spec: The model.
        tokenizer: Tunix's adapter.
        task: Data and rewards.
        memory: Estimated memory on each device.
    """

    spec: ModelSpec
    tokenizer: Any
    task: Task
    memory: MemoryEstimate


def prepare(config: TrainConfig) -> Prepared:
    """Does everything before loading weights: what `--dry-run` checks.

    Raises:
        InvalidConfigError: names the key and what is wrong with it.
    """
    mesh, _ = make_meshes(config)
    spec = find_model(config.model)
    check_resume(config, spec)
    memory = estimate_memory(config, spec, mesh, make_optimizers(config))
    tokenizer = load_tokenizer(config)
    return Prepared(
        spec=spec, tokenizer=tokenizer, task=load_task(config.task, tokenizer), memory=memory
    )


def run(
    config: TrainConfig,
    *,
    on_step: Callable[[StepRecord], None] = lambda record: None,
    on_eval: Callable[[EvalRecord], None] = lambda record: None,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
    timeline: TimelineSteps | None = None,
) -> RunResult:
    """Trains as the config says, with Tunix's learner.

    Resumes from the newest checkpoint of `training.checkpoint_root_directory`, if there is one.
    Writes records.json and, if matplotlib is installed, training.png. Metrics of the engine's
    rollouts go to Tunix's loggers.

    Args:
        config: From `load_config`.
        on_step: Called after each step, on the thread that logs Tunix's metrics.
        on_eval: The same for each evaluation between steps.
        should_stop: Called before each step; True ends the run as if its data had ended, with a
            last checkpoint.
        progress: Draws bars of the engine's rollouts; None writes a line for each slow phase.
        timeline: Steps to record for Perfetto.

    Raises:
        InvalidConfigError: names the key and what is wrong with it.
    """
    _check_timeline(config, timeline)
    prepared = prepare(config)
    keep_lora_settings(config)
    recorder = StepRecorder(on_step, on_eval)
    tracer = None if timeline is None else Timeline()
    timed = functools.partial(
        TimedRollout,
        engine=rollout_engine(config, progress),
        weight_version=weight_version_of,
        on_generate=recorder.add_rollout,
    )
    perf_config = None if tracer is None else tracer.perf_config
    cluster = make_cluster(config, prepared.spec, prepared.tokenizer, timed, perf_config)
    worker = cluster.rollout
    assert isinstance(worker, TimedRollout)
    try:
        learner = make_learner(config, cluster, prepared.task.reward_fns)
        done = cluster.actor_trainer.train_steps // updates_per_step(config)
        cluster.global_steps = done  # Tunix's last checkpoint of a run does not hold it
        cluster.with_external_metrics_logger(recorder.add_metrics)
        if config.rollout_engine == "sgljax":
            log_rollout_metrics(cluster)
        if tracer is not None and timeline is not None:
            first_step = done + timeline.skipped_steps
            tracer.record_steps(
                cluster, timeline.path, first_step=first_step, num_steps=timeline.num_steps
            )
        recorder.start(done + 1)
        if done < config.training.steps:
            learner.train(
                _TrainingData(config, prepared.task, should_stop),
                _eval_batches(config, prepared.task),
            )
        was_stopped = done + len(recorder.records) < config.training.steps
        if prepared.task.eval_rows and not was_stopped:
            reward = evaluate(cluster, prepared.task)
            recorder.evals.append(EvalRecord(num_steps=config.training.steps, reward=reward))
    finally:
        close_rollout(worker.inner)
    return RunResult(
        records=recorder.records,
        evals=recorder.evals,
        resumed_from=done,
        was_stopped=was_stopped,
        files=_write(config, recorder),
    )


def _check_timeline(config: TrainConfig, timeline: TimelineSteps | None) -> None:
    if timeline is None:
        return
    if config.rollout_engine != "sgljax":
        raise InvalidConfigError(
            f"a timeline is of the engine 'sgljax'; rollout_engine is {config.rollout_engine!r}"
        )
    needed = timeline.skipped_steps + timeline.num_steps
    if needed > config.training.steps:
        raise InvalidConfigError(
            f"a timeline of {timeline.num_steps} step(s) after {timeline.skipped_steps} needs "
            f"training.steps >= {needed}, got {config.training.steps}"
        )


def evaluate(cluster: RLCluster, task: Task) -> float:
    """The mean reward of one completion for each held-out row, as `rollout.eval` samples."""
    batch = to_batch(task.eval_rows)
    prompts = [str(prompt) for prompt in batch.pop("prompts")]
    completions = cluster.generate(prompts, mode=Mode.EVAL).text
    columns = {name: list(values) for name, values in batch.items()}
    rewards = [
        np.asarray(function(prompts=prompts, completions=completions, **columns), np.float64)
        for function in task.reward_fns
    ]
    return float(np.sum(rewards, axis=0).mean())


class _TrainingData:
    """Endless batches: Tunix stops after its number of steps, or when the user wants."""

    def __init__(self, config: TrainConfig, task: Task, should_stop: Callable[[], bool]) -> None:
        self._config = config
        self._task = task
        self._should_stop = should_stop

    def __iter__(self) -> Iterator[TrainingInputT]:
        config = self._config
        seed = config.seed if config.task.shuffle else None
        drawn = batches(
            self._task.rows, config.training.batch_size, shuffle_seed=seed, num_batches=None
        )
        yield next(drawn)  # Tunix looks at its size before it trains
        for batch in drawn:
            if self._should_stop():
                return
            yield batch


def _eval_batches(config: TrainConfig, task: Task) -> list[TrainingInputT] | None:
    rows, size = task.eval_rows, config.training.batch_size
    return [to_batch(rows[i : i + size]) for i in range(0, len(rows), size)] or None


def _write(config: TrainConfig, recorder: StepRecorder) -> list[Path]:
    if not recorder.records:
        return []
    folder = Path(config.training.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    device = jax.devices()[0].device_kind
    files = [folder / "records.json"]
    write_json(files[0], settings_of(config, device), recorder.records, recorder.evals)
    with contextlib.suppress(ImportError):
        write_plot(folder / "training.png", config.title, recorder.records, recorder.evals)
        files.append(folder / "training.png")
    return files
