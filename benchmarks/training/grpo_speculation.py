"""GRPO on addition for some epochs over the same prompts, without speculation and with.

    python benchmarks/training/grpo_speculation.py                    # about four minutes
    python benchmarks/training/grpo_speculation.py --train-first 50   # of a trained policy, six
    python benchmarks/training/grpo_speculation.py --quick            # every line of it

Two trainings from `configs/grpo_addition.yaml`, both deterministic, take turns step by step in one
process; they differ in the engine option `speculation` alone. Drafts must change neither a token
nor a reward, loss or weight: else the script says where they do and exits with 1. From the second
epoch on, drafts come from the answers of the epochs before.

After that, the policy samples the prompts of a step again and again, in pairs of rollouts. And
`examples/grpo_tools.py`, in which episodes of several turns come and go, trains some steps; there
the order of its threads decides which seed a turn gets, so its tokens cannot be compared.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
from absl import logging as absl_logging

from benchmarks.lib.grpo_speculation_report import (
    FACT,
    MODES,
    epoch_lines,
    epochs_of,
    format_difference,
    repeat_lines,
    to_content,
    tool_lines,
)
from benchmarks.lib.grpo_turns import Training, train_in_turns
from benchmarks.lib.repeated_rollouts import Repeats, measure_repeats
from benchmarks.lib.reporting import ROOT, report_head, write_report
from benchmarks.lib.tool_rollouts import ToolRollouts, run_tools
from tunix_sgljax.bench.environment import Environment, describe_environment
from tunix_sgljax.training import TrainConfig, load_config

sys.path.insert(0, str(ROOT / "examples"))
from addition_task import save_checkpoint

CONFIG = ROOT / "configs/grpo_addition.yaml"
NUM_GENERATIONS = 8
"""Samples of a prompt."""

REPEATED_PROMPTS = (1, 2, 4, 16)
TOOL_PROMPTS = (2, 8)
FIRST_SEED = 1000
"""Seed of the problems of `--train-first`."""


def make_configs(num_prompts: int, overrides: list[str]) -> dict[str, TrainConfig]:
    """The configs of the two trainings, by their `speculation`.

    Args:
        num_prompts: Prompts of a step.
        overrides: More of them, as of `load_config`.
    """
    shared = [
        f"batch_size={num_prompts}",
        f"grpo_config.num_generations={NUM_GENERATIONS}",
        f"sgljax_config.max_running_requests={num_prompts * NUM_GENERATIONS}",
        "sgljax_config.enable_deterministic_sampling=true",
        *overrides,
    ]
    # Quoted, since YAML reads off as False.
    return {
        mode: load_config(CONFIG, [*shared, f"sgljax_config.speculation='{mode}'"])
        for mode in MODES
    }


def train_first(num_steps: int, path: Path) -> list[str]:
    """Trains the example's policy on other problems; returns the override that starts from it."""
    overrides = [f"num_batches={num_steps}", f"task.dataset_args.seed={FIRST_SEED}"]
    training = train_in_turns({"first": load_config(CONFIG, overrides)})["first"]
    policy: Any = training.policy
    save_checkpoint(path, policy, {"steps": str(num_steps)})
    print(f"trained {num_steps} steps first: last reward {training.rewards[-1]:.3f}", flush=True)
    return [f"actor_model_config.checkpoint={path}"]


def train(args: argparse.Namespace, overrides: list[str]) -> dict[str, Training]:
    """Trains without drafts and with, over the same prompts in each epoch."""
    sizes = [
        f"num_batches={args.epochs * args.steps_per_epoch}",
        f"task.dataset_args.num={args.prompts * args.steps_per_epoch}",
    ]
    return train_in_turns(make_configs(args.prompts, [*overrides, *sizes]))


def repeat(args: argparse.Namespace, trainings: dict[str, Training]) -> list[Repeats]:
    """Samples with the policy at the end, for each number of prompts."""
    numbers = REPEATED_PROMPTS[: 1 if args.quick else None]
    configs = make_configs(max(numbers), [])
    return measure_repeats(configs, trainings["auto"].policy, numbers, args.pairs)


def use_tools(args: argparse.Namespace) -> list[ToolRollouts]:
    """Runs the example with tools, if it is to run."""
    return [
        run_tools(mode, number, args.tool_steps)
        for number in TOOL_PROMPTS[: 1 if args.quick else None]
        for mode in MODES
        if args.tool_steps
    ]


def head(args: argparse.Namespace, environment: Environment) -> list[str]:
    """The first lines of the report."""
    first = f", trained for {args.train_first} steps on other problems" if args.train_first else ""
    return report_head(
        "GRPO on addition with speculation",
        "benchmarks/training/grpo_speculation.py"
        + (f" --train-first {args.train_first}" if args.train_first else ""),
        environment,
        "Model: the policy of `examples/grpo_addition.py`, 2.4 million parameters, float32, from "
        f"its supervised checkpoint{first}",
        f"{args.epochs} epochs of {args.steps_per_epoch} steps; a step samples each of "
        f"{args.prompts} prompts {NUM_GENERATIONS} times, all of them decoded together",
        "Both trainings with `enable_deterministic_sampling=True` and the same seeds, in turns",
        FACT,
        *args.fact,
    )


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Returns the command line's options."""
    parser = argparse.ArgumentParser(description="GRPO without speculation and with.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps-per-epoch", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=4, help="of a step")
    parser.add_argument(
        "--train-first", type=int, default=0, metavar="STEPS", help="start from a trained policy"
    )
    parser.add_argument("--pairs", type=int, default=30, help="of rollouts of the same prompts")
    parser.add_argument("--tool-steps", type=int, default=6, help="0 leaves the tools out")
    parser.add_argument("--quick", action="store_true", help="a smoke test")
    parser.add_argument("--fact", action="append", default=[], help="another line of the report")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks/results/grpo_speculation.md"
    )
    parser.add_argument("--work-dir", type=Path, default=Path("outputs/grpo_speculation"))
    args = parser.parse_args(argv)
    if args.quick:
        args.steps_per_epoch, args.prompts, args.pairs = 2, 1, 2
        args.tool_steps = min(args.tool_steps, 2)
    return args


def main(argv: list[str] | None = None) -> int:
    """Measures, writes the results, and returns the exit code."""
    args = parse_args(argv)
    absl_logging.set_verbosity(absl_logging.ERROR)
    overrides: list[str] = []
    if args.train_first:
        overrides = train_first(args.train_first, args.work_dir / "policy.safetensors")
    trainings = train(args, overrides)
    difference = trainings["off"].first_difference(trainings["auto"])
    epochs = epochs_of(trainings, args.steps_per_epoch)
    said = format_difference(difference, args.epochs * args.steps_per_epoch)
    print(said, flush=True)
    repeats, tools = repeat(args, trainings), use_tools(args)
    environment = describe_environment(jax.devices()[0].device_kind)
    lines = [
        *head(args, environment),
        said,
        "",
        *epoch_lines(epochs),
        *repeat_lines(repeats),
        *tool_lines(tools),
    ]
    content = to_content(trainings, epochs, repeats, tools)
    content = {"steps_per_epoch": args.steps_per_epoch, "differs_from": difference, **content}
    write_report(args.output, lines[:-1], environment, content)
    return int(bool(difference) or any(each.num_differing for each in repeats))


if __name__ == "__main__":
    sys.exit(main())
