"""GRPO on addition with over-sampling: reward against time, and what carried groups cost.

    python benchmarks/throughput/over_sampling.py --seeds 0    # some minutes on 2 cores
    python benchmarks/throughput/over_sampling.py --quick      # a smoke test

Trainings are added to those of earlier runs, one by one.

`configs/grpo_addition.yaml`, 16 prompts with 8 samples a step, but with 32 rows for the 128
requests, so that a step has a tail. Ways take turns, seed by seed. Rewards are those of the samples
that a step trained on; over-sampling prefers groups that end early, so the held-out score, of
sampled answers to 256 other problems, is what to compare. Seconds are those of steps after the
second, since the first ones compile; to wait is the part that a step spends on its samples.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from benchmarks.lib.reporting import ROOT, make_parser, output_dir, read_results, write_results
from tunix_sgljax import OverSampling, OverSamplingGrpoLearner, SglJaxRollout
from tunix_sgljax.training import load_config

sys.path.insert(0, str(ROOT / "examples"))

import addition_task

WAYS: dict[str, tuple[str, OverSampling]] = {
    "plain": ("fcfs", OverSampling(factor=1.0, unfinished="drop")),
    "plain, longest first": ("longest_first", OverSampling(factor=1.0, unfinished="drop")),
    "1.25 times, drop": ("longest_first", OverSampling(unfinished="drop")),
    "1.25 times, carry, age 1": ("longest_first", OverSampling()),
    "1.25 times, carry, age 2": ("longest_first", OverSampling(max_age=2)),
}
"""The order of starts and the over-sampling, by name."""

_COMPILING_STEPS = 2


class Training(NamedTuple):
    """What a training recorded.

    Attributes:
        ends_s: Seconds from the start to the end of each step's rewards.
        rewards: Mean reward of what each step trained on.
        waits_s: Seconds that each step waited for its samples.
        held_out: Share of right answers to other problems at the end, sampled as in training.
    """

    ends_s: list[float]
    rewards: list[float]
    waits_s: list[float]
    held_out: float

    @property
    def step_s(self) -> float:
        """Mean seconds of a step, without those that compile."""
        return float(np.mean(np.diff(self.ends_s)[_COMPILING_STEPS - 1 :]))

    @property
    def wait_s(self) -> float:
        """Mean seconds of waiting, likewise."""
        return float(np.mean(self.waits_s[_COMPILING_STEPS:]))


def train(way: str, seed: int, num_steps: int, num_rows: int) -> Training:
    """Trains one way with a seed."""
    config = load_config(ROOT / "configs/grpo_addition.yaml")
    policy, over_sampling = WAYS[way]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    assert config.actor_model_config.checkpoint is not None
    checkpoint = Path(config.actor_model_config.checkpoint)
    max_prompt_length, max_tokens = config.max_tokens
    optimizer = config.rl_training_config["actor_optimizer_config"]
    rollout_config = RolloutConfig(
        max_tokens_to_generate=max_tokens,
        max_prompt_length=max_prompt_length,
        kv_cache_size=max_prompt_length + max_tokens,
        temperature=1.0,
    )
    engine = functools.partial(
        SglJaxRollout,
        page_size=16,
        max_running_requests=num_rows,
        schedule_policy=policy,
        random_seed=seed,
    )
    cluster = RLCluster(
        actor=addition_task.load_checkpoint(checkpoint, mesh),
        reference=addition_task.load_checkpoint(checkpoint, mesh),
        tokenizer=addition_task.Tokenizer(),
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
            rollout_engine=engine,  # pyright: ignore[reportArgumentType]  a partial will do
            rollout_config=rollout_config,
            training_config=RLTrainingConfig(
                actor_optimizer=optax.chain(
                    optax.clip_by_global_norm(optimizer["max_grad_norm"]),
                    optax.adam(optimizer["learning_rate"]),
                ),
                eval_every_n_steps=num_steps + 1,
                max_steps=num_steps,
                rollout_micro_batch_size=config.batch_size,
            ),
        ),
    )
    cluster.actor_trainer.config.max_steps = None
    recorder = _Recorder()
    cluster.with_external_metrics_logger(recorder.add)
    learner = OverSamplingGrpoLearner(
        cluster, GRPOConfig(**config.grpo_config), recorder.reward, over_sampling=over_sampling
    )
    # Those who drop groups take more prompts for as many steps.
    num_batches = round(num_steps * (1 if over_sampling.carries else over_sampling.factor))
    batches = addition_task.problem_batches(num_batches, config.batch_size, seed)
    rollout: Any = cluster.rollout
    try:
        learner.train(batches)
        held_out = _held_out(rollout, rollout_config)
    finally:
        rollout.close()
    return Training(recorder.ends_s, recorder.rewards, recorder.waits_s, held_out)


class _Recorder:
    """Takes rewards and metrics while a training runs."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []
        self.rewards: list[float] = []
        self.waits_s: list[float] = []
        self._start_s = time.perf_counter()

    def reward(self, prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> Any:
        """The example's reward."""
        rewards = addition_task.exact_match(prompts, completions, **columns)
        self.ends_s.append(time.perf_counter() - self._start_s)
        self.rewards.append(float(np.mean(rewards)))
        return rewards

    def add(self, metrics: Any) -> None:
        """Tunix's metrics of a step."""
        values = metrics.metrics.get("over_sampling/wait_s")
        if values is not None:
            self.waits_s.append(float(np.sum(values[0])))


def _held_out(rollout: SglJaxRollout, config: RolloutConfig) -> float:
    rows = addition_task.problem_rows(256, seed=12345)
    prompts, answers = ([row[name] for row in rows] for name in ("prompts", "answer"))
    output = rollout.generate(prompts, config)
    return float(np.mean(addition_task.exact_match(prompts, output.text, answers)))


def main(argv: Sequence[str] | None = None) -> None:
    """Trains all ways."""
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="to train with (0)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, help="of each training (25)")
    parser.add_argument("--rows", type=int, default=32, help="max_running_requests (32)")
    args = parser.parse_args(argv)
    num_steps = args.steps or (4 if args.quick else 25)
    output = output_dir(args) / "over_sampling.md"
    found = _earlier(output)
    for seed in args.seeds:
        for way in args.ways[:: -1 if seed % 2 else 1]:
            if str(seed) not in found[way]:
                found[way][str(seed)] = training = train(way, seed, num_steps, args.rows)
                print(way, seed, _line(way, [training]), flush=True)
                _write(output, found, f"{num_steps} steps, {args.rows} rows", is_quick=args.quick)


def _write(
    output: Path, found: dict[str, dict[str, Training]], sizes: str, *, is_quick: bool
) -> None:
    """Writes all that has been trained so far."""
    trained = {way: list(some.values()) for way, some in found.items() if some}
    seeds = sorted({seed for some in found.values() for seed in some})
    lines = [
        f"{sizes}, seeds {', '.join(seeds)}; means, and each score.",
        "",
        "| way | step, s | of it waiting, s | reward, last 5 steps | held out |",
        "|---|---:|---:|---|---|",
        *(_line(way, trainings) for way, trainings in trained.items()),
        "",
        *_curves(trained),
    ]
    trainings = {
        way: {seed: each._asdict() for seed, each in some.items()} for way, some in found.items()
    }
    write_results(
        output,
        "GRPO on addition with over-sampling",
        "benchmarks/throughput/over_sampling.py",
        lines,
        {"is_quick": is_quick, "trainings": trainings},
    )


def _earlier(output: Path) -> dict[str, dict[str, Training]]:
    """Trainings of earlier runs, by way and seed."""
    found = read_results(output).get("trainings", {})
    return {
        way: {seed: Training(**each) for seed, each in found.get(way, {}).items()} for way in WAYS
    }


def _curves(trained: dict[str, list[Training]]) -> list[str]:
    """Rewards against time: the mean over seeds of the last 3 steps up to each moment."""
    warm = {
        way: [np.asarray(each.ends_s) - each.ends_s[_COMPILING_STEPS - 1] for each in trainings]
        for way, trainings in trained.items()
    }
    end_s = min(float(each[-1]) for some in warm.values() for each in some)
    moments = np.linspace(end_s / 6, end_s, 6)
    lines = ["Rewards so many seconds after the steps that compile, mean of the last 3 steps:", ""]
    lines += ["| way | " + " | ".join(f"{moment:.1f} s" for moment in moments) + " |"]
    lines += ["|---|" + "---:|" * len(moments)]
    for way, trainings in trained.items():
        values = []
        for moment in moments:
            counts = [int((ends <= moment).sum()) for ends in warm[way]]
            last = [
                float(np.mean(each.rewards[max(count - 3, 0) : count]))
                for each, count in zip(trainings, counts, strict=True)
            ]
            values.append(f"{np.mean(last):.3f}")
        lines.append(f"| {way} | {' | '.join(values)} |")
    return [*lines, ""]


def _line(way: str, trainings: Sequence[Training]) -> str:
    def each(values: list[float]) -> str:
        return f"{np.mean(values):.3f} ({', '.join(f'{value:.2f}' for value in values)})"

    step_s, wait_s = (np.mean([getattr(t, n) for t in trainings]) for n in ("step_s", "wait_s"))
    rewards = each([float(np.mean(training.rewards[-5:])) for training in trainings])
    held_out = each([training.held_out for training in trainings])
    return f"| {way} | {step_s:.3f} | {wait_s:.3f} | {rewards} | {held_out} |"


if __name__ == "__main__":
    main()
