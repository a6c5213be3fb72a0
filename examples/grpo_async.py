"""Asynchronous GRPO: episodes of the next steps run while the policy trains and changes.

    python examples/grpo_async.py                     # weights change while episodes are in flight
    python examples/grpo_async.py --update drain      # Tunix's lock: every sync waits for them

It is an agentic Tunix program of single-turn episodes on the repeated-addition task, whose
answers have long-tailed lengths. With `--grader-median-s 0.25` an episode also waits for its
grader, as where code is run or a tool is asked: no work for this machine, but with a long tail.
With `--update drain --off-policy-steps 0` it is synchronous GRPO: nothing runs while the policy
trains.
"""

from __future__ import annotations

import no_advice as no_advice  # isort: skip

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging as absl_logging
from tunix.rl.agentic.agentic_grpo_learner import GRPOConfig
from tunix.rl.agentic.environments.base_environment import EnvStepResult
from tunix.rl.agentic.environments.task_environment import TaskEnvironment
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from addition_task import Tokenizer, load_checkpoint
from agentic_parts import GrpoSettings, PlainParser, read_settings, training_config
from async_steps import AsyncStep, StepClock, summarize
from multiples_task import model_config, problem_batches
from tunix_sgljax import AgenticGrpoLearner, SglJaxRollout

ROOT = Path(__file__).resolve().parents[1]


@dataclasses.dataclass
class SamplingSettings:
    """The section `sampling` of the config file."""

    max_prompt_length: int = 16
    max_new_tokens: int = 176
    temperature: float = 1.0
    top_p: float = 1.0


@dataclasses.dataclass
class GraderSettings:
    """The section `grader` of the config file: lognormal seconds that an episode waits."""

    median_s: float = 0.0
    sigma: float = 1.0
    max_s: float = 4.0


@dataclasses.dataclass
class Settings:
    """The config file. The checkpoint's path is relative to the root of the repository."""

    checkpoint: str = "examples/data/multiples_sft.safetensors"
    steps: int = 60
    seed: int = 0
    off_policy_steps: int = 1
    grpo: GrpoSettings = dataclasses.field(default_factory=GrpoSettings)
    sampling: SamplingSettings = dataclasses.field(default_factory=SamplingSettings)
    grader: GraderSettings = dataclasses.field(default_factory=GraderSettings)
    page_size: int = 16

    @property
    def max_concurrency(self) -> int:
        """All episodes that Tunix may have in flight, so that its lock cannot deadlock."""
        return self.grpo.max_concurrency(self.off_policy_steps)


def load_settings(path: Path) -> Settings:
    """Returns the settings in a YAML file; see `read_settings`."""
    return read_settings(path, Settings)


class GradedEnvironment(TaskEnvironment):
    """An episode whose end waits for a grader that works elsewhere.

    The waits depend on the seed and on the episode only, so that all kinds of updates have the
    same ones.
    """

    def __init__(
        self,
        single_example: dict[str, Any],
        *,
        group_id: int,
        pair_index: int,
        grader: GraderSettings,
        seed: int,
    ) -> None:
        super().__init__(single_example, group_id=group_id, pair_index=pair_index)
        rng = np.random.default_rng((seed, group_id, pair_index))
        self._wait_s = min(grader.median_s * rng.lognormal(0.0, grader.sigma), grader.max_s)

    def _step_impl(self, action: Any) -> EnvStepResult:
        time.sleep(self._wait_s)
        return super()._step_impl(action)


def make_cluster(settings: Settings) -> RLCluster:
    """Returns Tunix's cluster: the policy, its reference, and the rollout engine, on one device."""
    grpo, sampling = settings.grpo, settings.sampling
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    checkpoint = ROOT / settings.checkpoint
    config = ClusterConfig(
        role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
        # Tunix's annotation leaves out the partial that its code accepts.
        rollout_engine=functools.partial(  # pyright: ignore[reportArgumentType]
            SglJaxRollout,
            page_size=settings.page_size,
            max_running_requests=settings.max_concurrency,
            random_seed=settings.seed,
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=sampling.max_new_tokens,
            max_prompt_length=sampling.max_prompt_length,
            kv_cache_size=sampling.max_prompt_length + sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            return_logprobs=True,
        ),
        training_config=training_config(grpo, settings.steps),
    )
    return RLCluster(
        actor=load_checkpoint(checkpoint, mesh, model_config()),
        reference=load_checkpoint(checkpoint, mesh, model_config()),
        tokenizer=Tokenizer(),
        cluster_config=config,
    )


def train(settings: Settings, update: str, on_step: Callable[[AsyncStep], None]) -> StepClock:
    """Trains with our agentic learner and returns what happened.

    Args:
        settings: The config.
        update: "in_flight" or "drain".
        on_step: Called after each step.
    """
    grpo = settings.grpo
    clock = StepClock(on_step)
    cluster = make_cluster(settings)
    rollout = cluster.rollout
    assert isinstance(rollout, SglJaxRollout)
    rollout.observers.on_updated.append(clock.add_sync)
    cluster.with_external_metrics_logger(clock.add_metrics)
    try:
        rollout.engine.warmup()  # episodes come and go: all batch sizes occur
        learner = AgenticGrpoLearner(
            cluster,
            GRPOConfig(
                num_generations=grpo.num_generations,
                beta=grpo.beta,
                epsilon=grpo.epsilon,
                max_response_length=settings.sampling.max_new_tokens,
                max_concurrency=settings.max_concurrency,
                off_policy_steps=settings.off_policy_steps,
            ),
            [clock.score],
            chat_parser=PlainParser(),
            env_class=GradedEnvironment,
            env_kwargs={"grader": settings.grader, "seed": settings.seed},
            weight_updates=update,
        )
        learner.train(problem_batches(settings.steps, grpo.prompts_per_step, settings.seed))
    finally:
        rollout.close()
    return clock


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Returns the command line's options."""
    parser = argparse.ArgumentParser(description="Asynchronous GRPO on repeated addition.")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/grpo_async.yaml")
    parser.add_argument("--update", choices=("in_flight", "drain"), default="in_flight")
    parser.add_argument("--off-policy-steps", type=int, help="instead of the config's")
    parser.add_argument("--grader-median-s", type=float, help="instead of the config's")
    parser.add_argument("--steps", type=int, help="instead of the config's")
    parser.add_argument("--seed", type=int, help="instead of the config's")
    parser.add_argument("--output", type=Path, default=Path("outputs/grpo_async/records.json"))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    args = parse_args(argv)
    settings = load_settings(args.config)
    for name in ("off_policy_steps", "steps", "seed"):
        value = getattr(args, name)
        if value is not None:
            setattr(settings, name, value)
    if args.grader_median_s is not None:
        settings.grader.median_s = args.grader_median_s
    absl_logging.set_verbosity(absl_logging.ERROR)

    device = jax.devices()[0].device_kind
    print(
        f"GRPO on repeated addition, {args.update} updates, off_policy_steps "
        f"{settings.off_policy_steps}, {settings.steps} steps of {settings.grpo.prompts_per_step} "
        f"prompts x {settings.grpo.num_generations}, on {device}. The first steps compile."
    )

    def show(step: AsyncStep) -> None:
        print(
            f"step {step.step}/{settings.steps}  reward {step.reward:.3f}  {step.step_s:.2f} s, "
            f"of them waiting {step.wait_s:.2f} s  {step.num_tokens} tokens",
            flush=True,
        )

    clock = train(settings, args.update, show)
    summary = summarize(clock)
    print(json.dumps(summary, indent=2))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    run = {"update": args.update, "device": device, **dataclasses.asdict(settings)}
    steps = [dataclasses.asdict(step) for step in clock.steps]
    content = {"settings": run, "summary": summary, "steps": steps}
    args.output.write_text(json.dumps(content, indent=2) + "\n")
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
