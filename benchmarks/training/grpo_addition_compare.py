"""Compares rollout engines on `examples/grpo_addition.py`, over several seeds.

    python benchmarks/training/grpo_addition_compare.py --seeds 0,1,2

Every run is a process of its own, one at a time; the engines take turns, and which one goes first
changes with every seed, so that a busy hour of the machine does not count against one of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.lib.reporting import ROOT, report_head, write_report
from tunix_sgljax.bench.environment import Environment, describe_environment


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One run of the example.

    Attributes:
        rollout: The engine.
        seed: Of the data and of the sampling.
        first_reward: Mean reward of the first 10 steps.
        last_reward: Mean reward of the last 10 steps.
        rollout_s: Median seconds of a rollout, the first step left out.
        tokens_per_s: Median speed of a rollout, likewise.
        step_s: Median seconds of a whole step, likewise.
        run_s: Seconds of the whole process, with imports and compilation.
    """

    rollout: str
    seed: int
    first_reward: float
    last_reward: float
    rollout_s: float
    tokens_per_s: float
    step_s: float
    run_s: float


def run_example(rollout: str, seed: int, steps: int | None, output_dir: Path) -> tuple[Run, str]:
    """Runs the example in a process of its own; returns what it measured, and its device.

    Raises:
        subprocess.CalledProcessError: The example failed.
    """
    command = [sys.executable, str(ROOT / "examples/grpo_addition.py")]
    command += ["--rollout", rollout, "--seed", str(seed), "--output-dir", str(output_dir)]
    if steps is not None:
        command += ["--steps", str(steps)]
    output_dir.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with (output_dir / "log.txt").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    run_s = time.perf_counter() - start
    records = json.loads((output_dir / "records.json").read_text())
    summary = records["summary"]
    run = Run(
        rollout=rollout,
        seed=seed,
        first_reward=summary["first_reward"],
        last_reward=summary["last_reward"],
        rollout_s=summary["rollout_s"],
        tokens_per_s=summary["tokens_per_s"],
        step_s=summary["step_s"],
        run_s=run_s,
    )
    return run, records["settings"]["device"]


def format_report(runs: Sequence[Run], environment: Environment) -> list[str]:
    """Returns the lines of the comparison in Markdown."""
    lines = [
        *report_head(
            "GRPO on addition: rollout engines compared",
            "benchmarks/training/grpo_addition_compare.py",
            environment,
        ),
        "Rewards are means of 10 steps. Times of rollouts and steps are medians without the first "
        "step; the run is the whole process, with imports and compilation.",
        "",
        "| rollout | seed | first reward | last reward | gain | rollout s/step | tokens/s | "
        "step s | run s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for run in sorted(runs, key=lambda run: (run.rollout, run.seed)):
        lines.append(_row(run.rollout, str(run.seed), [run]))
    for rollout in sorted({run.rollout for run in runs}):
        lines.append(_row(rollout, "mean", [run for run in runs if run.rollout == rollout]))
    return lines


def _row(rollout: str, seed: str, runs: Sequence[Run]) -> str:
    def mean(name: str) -> float:
        return float(np.mean([getattr(run, name) for run in runs]))

    first, last = mean("first_reward"), mean("last_reward")
    return (
        f"| {rollout} | {seed} | {first:.3f} | {last:.3f} | {last - first:+.3f} "
        f"| {mean('rollout_s'):.2f} | {mean('tokens_per_s'):.0f} | {mean('step_s'):.2f} "
        f"| {mean('run_s'):.0f} |"
    )


def main(argv: list[str] | None = None) -> None:
    """Runs the comparison and writes its results."""
    parser = argparse.ArgumentParser(description="Compare rollout engines.")
    parser.add_argument("--rollouts", default="sgljax,vanilla")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, help="instead of the example's")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/grpo_addition.md")
    parser.add_argument("--work-dir", type=Path, default=Path("outputs/grpo_addition_compare"))
    args = parser.parse_args(argv)

    rollouts = args.rollouts.split(",")
    runs: list[Run] = []
    device = ""
    for index, seed in enumerate(map(int, args.seeds.split(","))):
        for rollout in rollouts if index % 2 == 0 else rollouts[::-1]:
            output_dir = args.work_dir / f"{rollout}-{seed}"
            run, device = run_example(rollout, seed, args.steps, output_dir)
            runs.append(run)
            print(
                f"{rollout} seed {seed}: last reward {run.last_reward:.3f}, "
                f"rollout {run.rollout_s:.2f} s, run {run.run_s:.0f} s",
                flush=True,
            )
    environment = describe_environment(device)
    content = {"runs": [dataclasses.asdict(run) for run in runs]}
    write_report(args.output, format_report(runs, environment), environment, content)


if __name__ == "__main__":
    main()
