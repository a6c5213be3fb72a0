"""PPO with a critic on addition: the policy of the GRPO demo, and a value for each of its tokens.

    python examples/ppo_addition.py                  # our engine samples
    python examples/ppo_addition.py --steps 5 --rollout vanilla

The program is `tunix_sgljax.training.run`: Tunix's `PPOLearner`, with the policy's own network as
the critic, one output in place of its logits. `configs/ppo_addition.yaml` has all settings.
"""

from __future__ import annotations

import no_advice as no_advice  # isort: skip

import argparse
import sys
from pathlib import Path

from absl import logging as absl_logging

from tunix_sgljax.training import load_config, run
from tunix_sgljax.training.report import StepLines, format_summary

CONFIG = Path(__file__).resolve().parents[1] / "configs/ppo_addition.yaml"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Returns the command line's options."""
    parser = argparse.ArgumentParser(description="PPO with a critic on addition.")
    parser.add_argument("--rollout", choices=("sgljax", "vanilla"), default="sgljax")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=128, help="prompts of a step")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/ppo_addition"))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    args = parse_args(argv)
    absl_logging.set_verbosity(absl_logging.ERROR)
    config = load_config(
        CONFIG,
        [
            f"rollout_engine={args.rollout}",
            f"num_batches={args.steps}",
            f"batch_size={args.batch_size}",
            f"output_dir={args.output_dir}",
        ],
    )
    result = run(config, on_step=StepLines(args.steps))
    print(f"\n{format_summary(result.records)}\nwrote {result.file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
