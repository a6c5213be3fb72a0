"""Compares full training with LoRA on `examples/grpo_addition.py`, over several seeds.

    python benchmarks/training/grpo_addition_lora.py --seeds 0,1,2 --ranks 8

Every run is a process of its own, one at a time; both take as many steps, and which one goes first
changes with every seed. Rewards are what is compared; for seconds the machine must do nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.lib.reporting import ROOT, report_head, write_report
from tunix_sgljax.bench.environment import Environment, describe_environment

GOOD_REWARD = 0.8
WINDOW = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One run of the example.

    Attributes:
        rank: Of the LoRA pairs; None where all parameters are trained.
        seed: Of the data, the sampling and new pairs.
        rewards: The mean reward of each step.
        learning_rate: Of the config.
        alpha: Of the pairs; None without them.
    """

    rank: int | None
    seed: int
    rewards: list[float]
    learning_rate: float
    alpha: float | None

    @property
    def name(self) -> str:
        """What is trained."""
        return "all parameters" if self.rank is None else f"LoRA, rank {self.rank}"

    @property
    def first_reward(self) -> float:
        """Of the first step, before any update."""
        return self.rewards[0]

    @property
    def last_reward(self) -> float:
        """Mean of the last 10 steps."""
        return float(np.mean(self.rewards[-10:]))

    @property
    def good_step(self) -> int | None:
        """The first step at which the mean of the last `WINDOW` rewards is `GOOD_REWARD`."""
        means = np.convolve(self.rewards, np.ones(WINDOW) / WINDOW, "valid")
        good = np.flatnonzero(means >= GOOD_REWARD)
        return int(good[0]) + WINDOW if good.size else None


def run_example(rank: int | None, seed: int, output_dir: Path) -> tuple[Run, str]:
    """Runs the example in a process of its own; returns what came of it, and its device.

    Raises:
        subprocess.CalledProcessError: The example failed.
    """
    command = [sys.executable, str(ROOT / "examples/grpo_addition.py"), "--seed", str(seed)]
    command += ["--output-dir", str(output_dir)]
    command += [] if rank is None else ["--lora", str(rank)]
    output_dir.mkdir(parents=True, exist_ok=True)
    with (output_dir / "log.txt").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    records = json.loads((output_dir / "records.json").read_text())
    settings = records["settings"]
    run = Run(
        rank=rank,
        seed=seed,
        rewards=[step["reward"] for step in records["steps"]],
        learning_rate=settings["training"]["optimizer"]["learning_rate"],
        alpha=None if rank is None else settings["lora"]["alpha"],
    )
    return run, settings["device"]


def format_report(runs: Sequence[Run], environment: Environment) -> list[str]:
    """Returns the lines of the comparison in Markdown."""
    num_steps = len(runs[0].rewards)
    lines = [
        *report_head(
            "GRPO on addition: LoRA and full training compared",
            "benchmarks/training/grpo_addition_lora.py",
            environment,
        ),
        f"The config is that of `make demo`, {num_steps} steps, but for LoRA and the learning "
        "rate. The first reward is that of step 1, the last one the mean of the last 10 steps. "
        "The last column has the step at which the mean of "
        f"{WINDOW} rewards reached {GOOD_REWARD}. Other work ran on the machine, so no seconds "
        "are given.",
        "",
        "| trained | alpha | learning rate | seed | first reward | last reward | gain "
        f"| {GOOD_REWARD} at step |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {run.name} | {'-' if run.alpha is None else f'{run.alpha:g}'} | {run.learning_rate:g} "
        f"| {run.seed} | {run.first_reward:.3f} | {run.last_reward:.3f} "
        f"| {run.last_reward - run.first_reward:+.3f} | {run.good_step or '-'} |"
        for run in sorted(runs, key=lambda run: (run.rank or 0, run.seed))
    ]
    for name in dict.fromkeys(run.name for run in sorted(runs, key=lambda run: run.rank or 0)):
        of_name = [run for run in runs if run.name == name]
        first, last = (
            float(np.mean([getattr(run, field) for run in of_name]))
            for field in ("first_reward", "last_reward")
        )
        lines.append(f"| {name} | | | mean | {first:.3f} | {last:.3f} | {last - first:+.3f} | |")
    return lines


def main(argv: list[str] | None = None) -> None:
    """Runs the comparison and writes its results."""
    parser = argparse.ArgumentParser(description="Compare LoRA with full training.")
    parser.add_argument("--ranks", default="8")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks/results/grpo_addition_lora.md"
    )
    parser.add_argument("--work-dir", type=Path, default=Path("outputs/grpo_addition_lora_compare"))
    args = parser.parse_args(argv)

    ranks = [None, *map(int, args.ranks.split(","))]
    runs: list[Run] = []
    device = ""
    for index, seed in enumerate(map(int, args.seeds.split(","))):
        for rank in ranks if index % 2 == 0 else ranks[::-1]:
            run, device = run_example(rank, seed, args.work_dir / f"{rank or 'full'}-{seed}")
            runs.append(run)
            print(f"{run.name}, seed {seed}: last reward {run.last_reward:.3f}", flush=True)
    environment = describe_environment(device)
    content = {"runs": [dataclasses.asdict(run) for run in runs]}
    write_report(args.output, format_report(runs, environment), environment, content)


if __name__ == "__main__":
    main()
