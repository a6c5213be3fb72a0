"""GRPO on addition with an evaluation on held-out sums between the steps.

    python examples/evaluate_between_steps.py --every 10

Tunix calls the engine for it, with the weights of that moment and with sampling of its own: greedy
here, while training samples at temperature 1. A first greedy answer is mostly right already; what
training changes is how often a sample is, so the table shows both.
"""

from __future__ import annotations

import no_advice as no_advice  # isort: skip

import argparse
import sys
from pathlib import Path

from absl import logging as absl_logging

from tunix_sgljax.training import RunResult, load_config, run
from tunix_sgljax.training.report import StepLines

CONFIG = Path(__file__).resolve().parents[1] / "configs/grpo_addition.yaml"


def train(steps: int, batch_size: int, every: int, held_out: int, output_dir: Path) -> RunResult:
    """Trains, and evaluates on so many held-out sums every so many steps and at the end."""
    num = steps * batch_size
    config = load_config(
        CONFIG,
        [
            f"num_batches={steps}",
            f"batch_size={batch_size}",
            f"output_dir={output_dir}",
            f"rl_training_config.eval_every_n_steps={every}",
            f"task.dataset_args={{num: {num}, seed: 0}}",
            "task.eval_dataset=addition_task:held_out_rows",
            f"task.eval_dataset_args={{num: {held_out}, seed: 1, num_train: {num}, train_seed: 0}}",
            "eval_rollout_config={temperature: 0}",
        ],
    )
    return run(config, on_step=StepLines(steps))


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Returns the command line's options."""
    parser = argparse.ArgumentParser(description="Evaluation between the steps of GRPO.")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=16, help="prompts of a step")
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--held-out", type=int, default=64, help="sums of an evaluation")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/evaluate_between_steps"))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    args = parse_args(argv)
    absl_logging.set_verbosity(absl_logging.ERROR)
    result = train(args.steps, args.batch_size, args.every, args.held_out, args.output_dir)
    print("\nsteps trained   held out, greedy   next step, sampled")
    for record in result.evals:
        sampled = [
            f"{step.reward:.3f}" for step in result.records if step.step == record.num_steps + 1
        ]
        print(f"{record.num_steps:>13}{record.reward:>19.3f}{''.join(sampled):>21}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
