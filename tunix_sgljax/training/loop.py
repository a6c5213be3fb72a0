"""A training run from its config: load, train, evaluate, write."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tunix.rl.algorithm_config import AlgorithmConfig
from tunix.rl.rl_cluster import Mode, RLCluster, Role
from tunix.rl.rl_learner import TrainingInputT

from sgljax_engine import InvalidConfigError
from tunix_sgljax.observability.progress import Progress
from tunix_sgljax.observability.rollout_metrics import log_rollout_metrics
from tunix_sgljax.observability.timeline import Timeline
from tunix_sgljax.training.cluster import (
    check_sections,
    make_algorithm,
    make_cluster,
    make_learner,
    make_meshes,
    make_optimizers,
    make_over_sampling,
    rollout_engine,
)
from tunix_sgljax.training.evaluation import sum_rewards
from tunix_sgljax.training.lora import check_resume, checkpoint_root, keep_lora_settings
from tunix_sgljax.training.memory import MemoryEstimate, estimate_memory
from tunix_sgljax.training.models import ModelSpec, find_model, load_tokenizer
from tunix_sgljax.training.prompt_lengths import check_prompts
from tunix_sgljax.training.report import EvalRecord, RecordFile, StepRecord, StepRecorder
from tunix_sgljax.training.rollouts import TimedRollout
from tunix_sgljax.training.samples import Sample, SampleFile
from tunix_sgljax.training.schema import TrainConfig
from tunix_sgljax.training.task import GIVEN, Task, batches, check_call, load_task

logger = logging.getLogger(__name__)

_SKIPPED_STEPS = 1
"""Steps of a run before the one that a timeline records: the first ones compile."""


class RunResult(NamedTuple):
    """The result of a run.

    Attributes:
        records: Records of its steps; none if a checkpoint held all of them already.
        evals: Evaluations between the steps, and a last one at the end.
        resumed_from: Number of steps in the checkpoint that the run resumed from; 0 without one.
        was_stopped: Whether `should_stop` ended it early.
        file: records.json; None without records.
    """

    records: list[StepRecord]
    evals: list[EvalRecord]
    resumed_from: int
    was_stopped: bool
    file: Path | None


class Resumed(NamedTuple):
    """The checkpoint that a run resumes from, and the steps that it holds."""

    num_done: int
    folder: Path


class Prepared(NamedTuple):
    """A run before its weights are loaded; `memory` is an estimate for each device."""

    spec: ModelSpec
    tokenizer: Any
    task: Task
    memory: MemoryEstimate


def prepare(config: TrainConfig) -> Prepared:
    """Does everything before loading weights: what `--dry-run` checks.

    Raises:
        InvalidConfigError: names the key and what is wrong with it.
    """
    check_sections(config)
    if config.task.eval_dataset and not config.rl_training_config.get("eval_every_n_steps"):
        raise InvalidConfigError("task.eval_dataset needs rl_training_config.eval_every_n_steps")
    mesh, _ = make_meshes(config)
    spec = find_model(config.actor_model_config)
    check_resume(config, spec)
    memory = estimate_memory(config, spec, mesh, make_optimizers(config))
    tokenizer = load_tokenizer(config)
    task = load_task(config.task, tokenizer)
    check_prompts(config, tokenizer, task)
    fields = [field.name for field in dataclasses.fields(make_algorithm(config))]
    for function in task.reward_fns:
        check_call("task.reward_functions:", task, function, GIVEN, fields)
    over_sampling = make_over_sampling(config)
    if over_sampling is not None and over_sampling.known_rewards is not None:
        given = ("prompts", "completions", "finished", "trajectory_ids")
        check_call("over_sampling.known_rewards:", task, over_sampling.known_rewards, given)
    return Prepared(spec, tokenizer, task, memory)


def run(
    config: TrainConfig,
    *,
    on_resume: Callable[[Resumed], None] = lambda resumed: None,
    on_step: Callable[[StepRecord], None] = lambda record: None,
    on_eval: Callable[[EvalRecord], None] = lambda record: None,
    on_sample: Callable[[Sample], None] = lambda sample: None,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
    timeline: Path | None = None,
) -> RunResult:
    """Trains as the config says, with Tunix's learner.

    Resumes from the newest checkpoint of `checkpoint_root_directory`, if there is one, and writes
    records.json and samples.jsonl. Metrics of the engine's rollouts go to Tunix's loggers.

    Args:
        config: From `load_config`.
        on_resume: Called before the first step of a run that resumes.
        on_step: Called after each step, on the thread that logs Tunix's metrics.
        on_eval: The same for each evaluation between steps.
        on_sample: Called after `on_step` with a completion of the step, as often as
            `show_sample_every_n_steps` says.
        should_stop: Called before each step; True ends the run as if its data had ended, with a
            last checkpoint.
        progress: Draws bars of the engine's rollouts; None writes a line for each slow phase.
        timeline: Records the second step of this run there, for the Perfetto UI.

    Raises:
        InvalidConfigError: names the key and what is wrong with it.
    """
    if timeline is not None:
        _check_timeline(config)
    prepared = prepare(config)
    keep_lora_settings(config)
    samples: SampleFile | None = None
    file: RecordFile | None = None

    def step_ended(record: StepRecord) -> None:
        on_step(record)
        if file is not None:
            file.update(recorder.records, recorder.evals)
        every = config.show_sample_every_n_steps
        if every and record.step % every == 0 and samples is not None and samples.first is not None:
            on_sample(samples.first)

    recorder = StepRecorder(step_ended, on_eval)
    tracer = None if timeline is None else Timeline()
    timed = functools.partial(
        TimedRollout, engine=rollout_engine(config, progress), on_generate=recorder.add_rollout
    )
    perf_config = None if tracer is None else tracer.perf_config
    cluster = make_cluster(config, prepared.spec, prepared.tokenizer, timed, perf_config)
    worker, task = cluster.rollout, prepared.task
    assert isinstance(worker, TimedRollout)
    try:
        num_updates = cluster.actor_trainer.train_steps
        done, folder = num_updates // config.updates_per_step, Path(config.output_dir)
        root = checkpoint_root(config)
        if root is not None and num_updates:
            _warn_of_other_critic(config, cluster)
            on_resume(Resumed(done, root / Role.ACTOR.value / str(num_updates)))
        file = RecordFile(folder / "records.json", config, done)
        samples = SampleFile(folder / "samples.jsonl", lambda: cluster.global_steps + 1, done)
        learner = make_learner(config, cluster, task, [samples.add])
        cluster.global_steps = done  # Tunix's last checkpoint of a run does not hold it
        cluster.with_external_metrics_logger(recorder.add_metrics)
        if config.rollout_engine == "sgljax":
            log_rollout_metrics(cluster)
        if tracer is not None and timeline is not None:
            tracer.record_steps(cluster, timeline, first_step=done + _SKIPPED_STEPS, num_steps=1)
        recorder.start(done + 1)
        if done < config.num_steps:
            numbers, size = range(len(task.eval_rows)), config.batch_size
            held_out = [task.eval_batch(numbers[i : i + size]) for i in numbers[::size]]
            data = _training_data(config, task, should_stop, num_updates)
            learner.train(data, held_out or None)
        num_steps = done + len(recorder.records)
        was_stopped = num_steps < config.num_steps
        if task.eval_rows and not was_stopped:
            reward = evaluate(cluster, task, make_algorithm(config))
            recorder.evals.append(EvalRecord(num_steps, reward))
    finally:
        worker.close()
        if samples is not None:
            samples.close()
    written = None
    if recorder.records:
        file.write(recorder.records, recorder.evals)
        written = file.path
    return RunResult(recorder.records, recorder.evals, done, was_stopped, written)


def _warn_of_other_critic(config: TrainConfig, cluster: RLCluster) -> None:
    """Tunix writes the two checkpoints one after the other, and restores the newest of each."""
    policy = cluster.actor_trainer.train_steps
    if config.training_mode == "ppo" and cluster.critic_trainer.train_steps != policy:
        logger.warning(
            "the policy resumes from update %d, but the critic from %d: the run died between the "
            "two checkpoints. To train both on the same rows, remove the newer one's folder",
            policy,
            cluster.critic_trainer.train_steps,
        )


def _check_timeline(config: TrainConfig) -> None:
    if config.rollout_engine != "sgljax":
        raise InvalidConfigError(
            f"a timeline is of the engine 'sgljax'; rollout_engine is {config.rollout_engine!r}"
        )
    if config.num_steps <= _SKIPPED_STEPS:
        raise InvalidConfigError(
            f"a timeline of the second step needs num_batches >= 2, got {config.num_steps}"
        )


def evaluate(cluster: RLCluster, task: Task, algorithm: AlgorithmConfig | None = None) -> float:
    """The mean reward of one completion for each held-out row, as `eval_rollout_config` samples.

    The learner's config names the reward manager; None takes Tunix's own.
    """
    columns = task.eval_batch(range(len(task.eval_rows)))
    prompts = [str(prompt) for prompt in columns.pop("prompts")]
    completions = cluster.generate(prompts, mode=Mode.EVAL).text
    return float(sum_rewards(task.reward_fns, prompts, completions, columns, algorithm).mean())


def _training_data(
    config: TrainConfig, task: Task, should_stop: Callable[[], bool], num_updates: int
) -> Iterator[TrainingInputT]:
    """Endless batches: Tunix stops after its number of steps, or when the user wants.

    A learner of Tunix that resumes skips the rows of each weight update. Where it trains on a batch
    several times, it skips too many; rows are put before the first ones for that.
    """
    num_batches = -(-num_updates // config.algorithm.get("num_iterations", 1))
    num_too_many = (num_updates - num_batches) * config.mini_batch_size
    num_skipped = num_too_many if config.over_sampling is None else 0
    seed = config.seed if config.task.shuffle else None
    drawn = batches(task.rows, config.batch_size, seed, num_skipped)
    yield next(drawn)  # Tunix looks at its size before it trains
    for batch in drawn:
        if should_stop():
            return
        yield batch
