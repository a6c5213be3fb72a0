"""GRPO on addition: a small policy learns, on a CPU, to stop spoiling its sums.

    python examples/grpo_addition.py                      # our engine samples
    python examples/grpo_addition.py --rollout vanilla    # Tunix's own sampler

It is a plain Tunix program: a policy, a frozen reference, `RLCluster`, `GRPOLearner`, and a reward
function. The rollout engine is one line of it, in `rollout_engine`. The policy starts from the
supervised checkpoint that `make_addition_checkpoint.py` made.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import optax
from absl import logging as absl_logging
from omegaconf import OmegaConf
from tunix.perf.metrics import MetricsBuffer
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig

from addition_task import Tokenizer, exact_match, load_checkpoint, problem_batches
from rollouts import RolloutTiming, SeededVanillaRollout, TimedRollout
from training_report import (
    ProgressReporter,
    StepRecord,
    format_summary,
    format_table,
    summarize,
    write_json,
    write_plot,
)
from tunix_sgljax import SglJaxRollout

_T = TypeVar("_T")

ROOT = Path(__file__).resolve().parents[1]
MIN_GAIN = 0.2  # by which `--check` tells that the policy has learnt


@dataclasses.dataclass
class GrpoSettings:
    """The section `grpo` of the config file."""

    prompts_per_step: int = 16
    num_generations: int = 8
    beta: float = 0.02
    epsilon: float = 0.2
    learning_rate: float = 1e-4
    max_grad_norm: float = 1.0


@dataclasses.dataclass
class SamplingSettings:
    """The section `sampling` of the config file."""

    max_prompt_length: int = 16
    max_new_tokens: int = 40
    temperature: float = 1.0
    top_p: float = 1.0


@dataclasses.dataclass
class EngineSettings:
    """The section `engine` of the config file."""

    page_size: int = 16
    max_running_requests: int = 128


@dataclasses.dataclass
class Settings:
    """The config file. The checkpoint's path is relative to the root of the repository."""

    checkpoint: str = "examples/data/addition_sft.safetensors"
    steps: int = 50
    seed: int = 0
    grpo: GrpoSettings = dataclasses.field(default_factory=GrpoSettings)
    sampling: SamplingSettings = dataclasses.field(default_factory=SamplingSettings)
    engine: EngineSettings = dataclasses.field(default_factory=EngineSettings)


def load_settings(path: Path) -> Settings:
    """Returns the settings in a YAML file.

    Raises:
        omegaconf.errors.OmegaConfBaseException: A key is unknown or a value has the wrong type.
    """
    return read_settings(path, Settings)


def read_settings(path: Path, kind: type[_T]) -> _T:
    """`load_settings` for settings of any kind, a dataclass."""
    merged = OmegaConf.merge(OmegaConf.structured(kind), OmegaConf.load(path))
    settings = OmegaConf.to_object(merged)
    assert isinstance(settings, kind)
    return settings


class RolloutChoice(NamedTuple):
    """A rollout engine for `ClusterConfig`, and what only some engines have."""

    engine: Callable[..., BaseRollout]
    weight_version: Callable[[Any], int | None]
    close: Callable[[Any], None]


def choose_rollout(name: str, settings: Settings) -> RolloutChoice:
    """Returns the rollout engine that `--rollout` names."""
    if name == "vanilla":
        engine = functools.partial(SeededVanillaRollout, seed=settings.seed)
        return RolloutChoice(engine, lambda rollout: None, lambda rollout: None)
    engine = functools.partial(
        SglJaxRollout, **dataclasses.asdict(settings.engine), random_seed=settings.seed
    )
    return RolloutChoice(engine, lambda rollout: rollout.weight_version, SglJaxRollout.close)


class StepRecorder:
    """Puts together what the rollout worker and Tunix tell about each step."""

    def __init__(self, on_step: Callable[[StepRecord], None]) -> None:
        self.records: list[StepRecord] = []
        self._on_step = on_step
        self._timings: list[RolloutTiming] = []
        self._step_start_s = time.perf_counter()

    def add_rollout(self, timing: RolloutTiming) -> None:
        """Takes the timing of one call of `generate`."""
        self._timings.append(timing)

    def add_metrics(self, metrics: MetricsBuffer) -> None:
        """Takes what Tunix logs at the end of each step; at its very end, an empty buffer."""
        if "rewards/score/mean" not in metrics.metrics:
            return
        rewards, _ = metrics.metrics["rewards/score/mean"]
        now_s = time.perf_counter()
        record = StepRecord(
            step=len(self.records) + 1,
            reward=float(np.mean(np.asarray(rewards, np.float64))),
            rollout_s=sum(timing.seconds for timing in self._timings),
            num_tokens=sum(timing.num_tokens for timing in self._timings),
            step_s=now_s - self._step_start_s,
            weight_version=self._timings[-1].weight_version,
        )
        self._timings.clear()
        self._step_start_s = now_s
        self.records.append(record)
        self._on_step(record)


def make_cluster(settings: Settings, rollout_engine: Callable[..., BaseRollout]) -> RLCluster:
    """Returns Tunix's cluster: the policy, its reference, and the rollout engine, on one device."""
    grpo, sampling = settings.grpo, settings.sampling
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    checkpoint = ROOT / settings.checkpoint
    config = ClusterConfig(
        role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
        rollout_engine=rollout_engine,  # pyright: ignore[reportArgumentType]  a partial will do
        rollout_config=RolloutConfig(
            max_tokens_to_generate=sampling.max_new_tokens,
            max_prompt_length=sampling.max_prompt_length,
            kv_cache_size=sampling.max_prompt_length + sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
        ),
        training_config=RLTrainingConfig(
            actor_optimizer=optax.chain(
                optax.clip_by_global_norm(grpo.max_grad_norm), optax.adam(grpo.learning_rate)
            ),
            eval_every_n_steps=settings.steps + 1,
            max_steps=settings.steps,
            # All prompts in one call: continuous batching needs the whole batch at once.
            rollout_micro_batch_size=grpo.prompts_per_step,
        ),
    )
    return RLCluster(
        actor=load_checkpoint(checkpoint, mesh),
        reference=load_checkpoint(checkpoint, mesh),
        tokenizer=Tokenizer(),
        cluster_config=config,
    )


def train(
    settings: Settings, rollout: RolloutChoice, on_step: Callable[[StepRecord], None]
) -> list[StepRecord]:
    """Trains with Tunix's `GRPOLearner` and returns what happened at each step."""
    grpo = settings.grpo
    recorder = StepRecorder(on_step)
    timed_rollout = functools.partial(
        TimedRollout,
        engine=rollout.engine,
        weight_version=rollout.weight_version,
        on_generate=recorder.add_rollout,
    )
    cluster = make_cluster(settings, timed_rollout)
    cluster.with_external_metrics_logger(recorder.add_metrics)
    # The data ends the run as well; without a limit of its own, the trainer draws no second bar.
    cluster.actor_trainer.config.max_steps = None
    learner = GRPOLearner(
        rl_cluster=cluster,
        algo_config=GRPOConfig(
            num_generations=grpo.num_generations, beta=grpo.beta, epsilon=grpo.epsilon
        ),
        reward_fns=exact_match,
    )
    timed = cluster.rollout
    assert isinstance(timed, TimedRollout)
    try:
        learner.train(problem_batches(settings.steps, grpo.prompts_per_step, settings.seed))
    finally:
        rollout.close(timed.inner)
    return recorder.records


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Returns the command line's options."""
    parser = argparse.ArgumentParser(description="GRPO on addition.")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/grpo_addition.yaml")
    parser.add_argument("--rollout", choices=("sgljax", "vanilla"), default="sgljax")
    parser.add_argument("--steps", type=int, help="instead of the config's")
    parser.add_argument("--seed", type=int, help="instead of the config's")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/grpo_addition"))
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 where the policy did not learn"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    args = parse_args(argv)
    settings = load_settings(args.config)
    full_steps = settings.steps
    settings.steps = full_steps if args.steps is None else args.steps
    settings.seed = settings.seed if args.seed is None else args.seed
    absl_logging.set_verbosity(absl_logging.ERROR)

    print(
        f"GRPO on addition, rollout by {args.rollout}, {settings.steps} steps of "
        f"{settings.grpo.prompts_per_step} prompts x {settings.grpo.num_generations}, on "
        f"{jax.devices()[0].device_kind}. The first step compiles."
    )
    progress = ProgressReporter(settings.steps)
    records = train(settings, choose_rollout(args.rollout, settings), progress.show)
    progress.close()

    args.output_dir.mkdir(parents=True, exist_ok=True)
    device = jax.devices()[0].device_kind
    run = {"rollout": args.rollout, "device": device, **dataclasses.asdict(settings)}
    write_json(args.output_dir / "records.json", run, records)
    title = f"GRPO on addition, rollout by {args.rollout} (seed {settings.seed})"
    write_plot(args.output_dir / "training.png", title, records)
    print(f"\n{format_table(records)}\n\n{format_summary(records)}")
    print(f"wrote {args.output_dir / 'records.json'} and {args.output_dir / 'training.png'}")

    if settings.steps >= full_steps and summarize(records).gain < MIN_GAIN:
        print(f"WARNING: the mean reward did not rise by {MIN_GAIN}", file=sys.stderr)
        return int(args.check)
    return 0


if __name__ == "__main__":
    sys.exit(main())
