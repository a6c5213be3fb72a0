"""GRPO on addition: a small policy learns, on a CPU, to stop spoiling its sums.

    python examples/grpo_addition.py                      # our engine samples
    python examples/grpo_addition.py --rollout vanilla    # Tunix's own sampler
    python examples/grpo_addition.py --lora 8             # trains LoRA pairs of rank 8 alone

It is a plain Tunix program: a policy, a frozen reference, `RLCluster`, `GRPOLearner`, and a reward
function. The rollout engine is chosen in `choose_rollout`; `tunix-sgljax train --config
configs/grpo_addition.yaml` is the same run without a program, and with grpo_addition_lora.yaml that
of `--lora 8`. The policy starts from the supervised checkpoint that `make_addition_checkpoint.py`
made.
"""

from __future__ import annotations

import no_advice as no_advice  # isort: skip

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import qwix
from absl import logging as absl_logging
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig

from addition_plot import write_plot
from addition_task import Tokenizer, exact_match, load_checkpoint, problem_batches
from tunix_sgljax import SglJaxRollout
from tunix_sgljax.checkpoints.lora_settings import LoraSettings
from tunix_sgljax.training import TrainConfig, load_config
from tunix_sgljax.training.report import (
    StepLines,
    StepRecord,
    StepRecorder,
    format_summary,
    summarize,
    write_json,
)
from tunix_sgljax.training.rollouts import SeededVanillaRollout, TimedRollout

ROOT = Path(__file__).resolve().parents[1]
MIN_GAIN = 0.2  # by which `--check` tells that the policy has learnt


def choose_rollout(config: TrainConfig) -> Callable[..., BaseRollout]:
    """Returns the rollout engine that the config names: all that differs."""
    if config.rollout_engine == "vanilla":
        return functools.partial(SeededVanillaRollout, seed=config.seed)
    return functools.partial(SglJaxRollout, **config.sgljax_config, random_seed=config.seed)


def add_lora(base: qwen3.Qwen3, lora: LoraSettings, seed: int) -> qwen3.Qwen3:
    """Returns a policy with LoRA pairs beside the weights of the base, which it shares."""
    provider = qwix.LoraProvider(
        module_path=lora.module_path,
        rank=lora.rank,
        alpha=lora.alpha,
        weight_qtype=lora.weight_qtype,
    )
    inputs = base.get_model_input()
    policy: Any = qwix.apply_lora_to_model(base, provider, **inputs, rngs=nnx.Rngs(seed))
    return policy


def make_cluster(
    config: TrainConfig,
    rollout_engine: Callable[..., BaseRollout],
    cluster_class: Callable[..., RLCluster] = RLCluster,
) -> RLCluster:
    """Returns Tunix's cluster: the policy, its reference, and the rollout engine, on one device."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    optimizer = config.rl_training_config["actor_optimizer_config"]
    max_prompt_length, max_tokens_to_generate = config.max_tokens
    assert config.actor_model_config.checkpoint is not None
    checkpoint = Path(config.actor_model_config.checkpoint)
    reference = load_checkpoint(checkpoint, mesh)
    if config.actor_model_config.lora_config is None:
        actor = load_checkpoint(checkpoint, mesh)
    else:
        actor = add_lora(reference, config.actor_model_config.lora_config, config.seed)
    return cluster_class(
        actor=actor,
        reference=reference,
        tokenizer=Tokenizer(),
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
            rollout_engine=rollout_engine,  # pyright: ignore[reportArgumentType]  a partial will do
            rollout_config=RolloutConfig(
                max_tokens_to_generate=max_tokens_to_generate,
                max_prompt_length=max_prompt_length,
                kv_cache_size=max_prompt_length + max_tokens_to_generate,
                temperature=config.rollout_config["temperature"],
                top_p=config.rollout_config["top_p"],
            ),
            training_config=RLTrainingConfig(
                actor_optimizer=optax.chain(
                    optax.clip_by_global_norm(optimizer["max_grad_norm"]),
                    optax.adam(optimizer["learning_rate"]),
                ),
                eval_every_n_steps=config.num_batches + 1,
                max_steps=config.num_batches,
                # All prompts in one call: continuous batching needs the whole batch at once.
                rollout_micro_batch_size=config.batch_size,
            ),
        ),
    )


def make_learner(config: TrainConfig, cluster: RLCluster, recorder: StepRecorder) -> GRPOLearner:
    """Returns Tunix's learner of a cluster whose steps are recorded; its data ends the run."""
    cluster.with_external_metrics_logger(recorder.add_metrics)
    # Without a limit of its own, the trainer draws no second bar.
    cluster.actor_trainer.config.max_steps = None
    return GRPOLearner(
        rl_cluster=cluster,
        algo_config=GRPOConfig(**config.grpo_config),
        reward_fns=exact_match,
    )


def train(config: TrainConfig, on_step: Callable[[StepRecord], None]) -> list[StepRecord]:
    """Trains with Tunix's `GRPOLearner` and returns what happened at each step."""
    recorder = StepRecorder(on_step)
    timed_rollout = functools.partial(
        TimedRollout, engine=choose_rollout(config), on_generate=recorder.add_rollout
    )
    cluster = make_cluster(config, timed_rollout)
    learner = make_learner(config, cluster, recorder)
    timed = cluster.rollout
    assert isinstance(timed, TimedRollout)
    try:
        learner.train(problem_batches(config.num_batches, config.batch_size, config.seed))
    finally:
        timed.close()
    return recorder.records


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Returns the command line's options."""
    parser = argparse.ArgumentParser(description="GRPO on addition.")
    parser.add_argument("--config", type=Path, help="default: the one in configs/")
    parser.add_argument(
        "--lora", type=int, metavar="RANK", help="train LoRA pairs, with grpo_addition_lora.yaml"
    )
    parser.add_argument("--rollout", choices=("sgljax", "vanilla"), help="instead of the config's")
    parser.add_argument("--steps", type=int, help="instead of the config's")
    parser.add_argument("--seed", type=int, help="instead of the config's")
    parser.add_argument("--output-dir", type=Path, help="instead of the config's")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 where the policy did not learn"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    args = parse_args(argv)
    given = {
        "rollout_engine": args.rollout,
        "num_batches": args.steps,
        "seed": args.seed,
        "output_dir": args.output_dir,
        "actor_model_config.lora_config.rank": args.lora,
    }
    overrides = [f"{key}={value}" for key, value in given.items() if value is not None]
    name = "grpo_addition" if args.lora is None else "grpo_addition_lora"
    path = args.config or ROOT / f"configs/{name}.yaml"
    config, full_steps = load_config(path, overrides), load_config(path).num_batches
    device = jax.devices()[0].device_kind
    absl_logging.set_verbosity(absl_logging.ERROR)

    print(
        f"GRPO on addition, rollout by {config.rollout_engine}, {config.num_batches} steps of "
        f"{config.batch_size} prompts x {config.num_generations}, on {device}. "
        "The first step compiles."
    )
    records = train(config, StepLines(config.num_batches))

    output_dir = Path(config.output_dir)
    write_json(output_dir / "records.json", config, records)
    title = f"GRPO on addition, rollout by {config.rollout_engine} (seed {config.seed})"
    write_plot(output_dir / "training.png", title, records)
    print(f"\n{format_summary(records)}")
    print(f"wrote {output_dir / 'records.json'} and {output_dir / 'training.png'}")

    if config.num_batches >= full_steps and summarize(records)["gain"] < MIN_GAIN:
        print(f"WARNING: the mean reward did not rise by {MIN_GAIN}", file=sys.stderr)
        return int(args.check)
    return 0


if __name__ == "__main__":
    sys.exit(main())
