"""Draining against in-flight weight updates on `examples/grpo_async.py`, over several seeds.

    python benchmarks/training/grpo_async_compare.py --seeds 0,1,2

Every run is a process of its own, one at a time; the variants take turns, and their order is
reversed with every seed, so that a busy hour of the machine does not count against one of them.
There are two scenarios. In `lengths` only the lengths of answers have a long tail, and the trainer
and the rollout compete for the same processor. In `waits` each episode also waits for a grader that
works elsewhere (see the example), which leaves the processor free.

A step is the time from one weight sync to the next. Its mean over a run, the first steps (which
compile) left out, is what training costs; the median tells it apart from a machine that was busy
with something else for a while.
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

VARIANTS = {
    "drain, off_policy_steps 0": ("drain", 0),
    "drain, off_policy_steps 1": ("drain", 1),
    "in flight, off_policy_steps 1": ("in_flight", 1),
}
SCENARIOS = {"lengths": "0", "waits": "0.25"}
"""The median seconds of a grader, for `--grader-median-s`."""

IN_FLIGHT = "in flight, off_policy_steps 1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One run of the example.

    Attributes:
        scenario: A key of `SCENARIOS`.
        variant: A key of `VARIANTS`.
        seed: Of the data and of the sampling.
        first_reward: Mean reward of the first 10 steps.
        last_reward: Mean reward of the last 10 steps.
        step_s: Mean seconds of a step.
        median_step_s: Median seconds of a step.
        wait_s: Median seconds of a step in which the trainer waited for completions.
        tokens: Mean tokens of a step's completions.
        mean_lag: Mean policies between sampling a token and training on it.
        mixed: Share of the sequences that more than one policy sampled.
        rewards: Of each step.
        step_seconds: Of each step.
    """

    scenario: str
    variant: str
    seed: int
    first_reward: float
    last_reward: float
    step_s: float
    median_step_s: float
    wait_s: float
    tokens: float
    mean_lag: float
    mixed: float
    rewards: list[float]
    step_seconds: list[float]


def run_example(
    scenario: str, variant: str, seed: int, steps: int | None, output_dir: Path, reuse: bool
) -> tuple[Run, str]:
    """Runs the example in a process of its own; returns what it measured, and its device.

    Args:
        scenario: A key of `SCENARIOS`.
        variant: A key of `VARIANTS`.
        seed: Of the data and of the sampling.
        steps: Of training; None takes the example's.
        output_dir: For its records and its log.
        reuse: Take the records that are there already, of a comparison that was cut short.

    Raises:
        subprocess.CalledProcessError: The example failed.
    """
    update, off_policy_steps = VARIANTS[variant]
    path = output_dir / f"{scenario}-{update}-{off_policy_steps}-{seed}.json"
    command = [sys.executable, str(ROOT / "examples/grpo_async.py"), "--update", update]
    command += ["--off-policy-steps", str(off_policy_steps), "--seed", str(seed)]
    command += ["--grader-median-s", SCENARIOS[scenario], "--output", str(path)]
    if steps is not None:
        command += ["--steps", str(steps)]
    output_dir.mkdir(parents=True, exist_ok=True)
    if not (reuse and path.exists()):
        with path.with_suffix(".txt").open("w") as log:
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    records = json.loads(path.read_text())
    summary = records["summary"]
    run = Run(
        scenario=scenario,
        variant=variant,
        seed=seed,
        first_reward=summary["first_reward"],
        last_reward=summary["last_reward"],
        step_s=summary["mean_step_s"],
        median_step_s=summary["step_s"],
        wait_s=summary["wait_s"],
        tokens=summary["num_tokens"],
        mean_lag=summary["weight_lag/mean"],
        mixed=summary["weight_lag/mixed_fraction"],
        rewards=[step["reward"] for step in records["steps"]],
        step_seconds=[step["step_s"] for step in records["steps"]],
    )
    return run, records["settings"]["device"]


def format_report(runs: Sequence[Run], environment: Environment, facts: Sequence[str]) -> list[str]:
    """Returns the lines of the comparison in Markdown."""
    lines = [
        *report_head(
            "Asynchronous GRPO: draining against in-flight updates",
            "benchmarks/training/grpo_async_compare.py",
            environment,
            *facts,
        ),
        "Seconds of a step are without the first steps; waiting is the median of the seconds that "
        "the trainer waited for completions. Rewards are means of 10 steps. Lag: policies between "
        "sampling a token and training on it. Mixed: sequences that more than one policy sampled.",
        "",
    ]
    for scenario in SCENARIOS:
        own = [run for run in runs if run.scenario == scenario]
        if own:
            lines += [f"## {scenario}", "", *_table(own), "", *_verdict(own), ""]
    return lines[:-1]


def _table(runs: Sequence[Run]) -> list[str]:
    lines = [
        "| updates | seed | step s, mean | median | waiting s | tokens/step | first reward | "
        "last reward | lag | mixed |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for variant in VARIANTS:
        own = [run for run in runs if run.variant == variant]
        lines += [_row(run.variant, str(run.seed), [run]) for run in own]
        lines.append(_row(variant, "mean", own))
    return lines


def _row(variant: str, seed: str, runs: Sequence[Run]) -> str:
    def mean(name: str) -> float:
        return float(np.mean([getattr(run, name) for run in runs]))

    return (
        f"| {variant} | {seed} | {mean('step_s'):.3f} | {mean('median_step_s'):.3f} "
        f"| {mean('wait_s'):.3f} | {mean('tokens'):.0f} | {mean('first_reward'):.3f} "
        f"| {mean('last_reward'):.3f} | {mean('mean_lag'):.2f} | {mean('mixed'):.2f} |"
    )


def _verdict(runs: Sequence[Run]) -> list[str]:
    """How much faster in-flight updates were, seed by seed, and how the rewards differ."""
    ours = {run.seed: run for run in runs if run.variant == IN_FLIGHT}
    lines = []
    for variant in VARIANTS:
        if variant == IN_FLIGHT:
            continue
        pairs = [(run, ours[run.seed]) for run in runs if run.variant == variant]
        ratios = [drained.step_s / own.step_s for drained, own in pairs]
        medians = [drained.median_step_s / own.median_step_s for drained, own in pairs]
        differences = [own.last_reward - drained.last_reward for drained, own in pairs]
        lines.append(
            f"- Against {variant}: {np.mean(ratios):.2f} times as fast (seed by seed "
            f"{', '.join(f'{ratio:.2f}' for ratio in ratios)}); by medians {np.mean(medians):.2f} "
            f"({', '.join(f'{ratio:.2f}' for ratio in medians)}); last reward "
            f"{np.mean(differences):+.3f} (seed by seed "
            f"{', '.join(f'{difference:+.3f}' for difference in differences)})."
        )
    return lines


def main(argv: list[str] | None = None) -> None:
    """Runs the comparison and writes its results."""
    parser = argparse.ArgumentParser(description="Compare draining and in-flight updates.")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--scenarios", default="lengths,waits")
    parser.add_argument("--steps", type=int, help="instead of the example's")
    parser.add_argument("--reuse", action="store_true", help="records of earlier runs")
    parser.add_argument("--fact", action="append", default=[], help="another line of the report")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/grpo_async.md")
    parser.add_argument("--work-dir", type=Path, default=Path("outputs/grpo_async_compare"))
    args = parser.parse_args(argv)

    runs: list[Run] = []
    device = ""
    for index, seed in enumerate(map(int, args.seeds.split(","))):
        for scenario in args.scenarios.split(","):
            for variant in list(VARIANTS)[:: 1 if index % 2 == 0 else -1]:
                run, device = run_example(
                    scenario, variant, seed, args.steps, args.work_dir, args.reuse
                )
                runs.append(run)
                print(
                    f"{scenario}: {variant}, seed {seed}: {run.step_s:.3f} s a step, "
                    f"last reward {run.last_reward:.3f}",
                    flush=True,
                )
    environment = describe_environment(device)
    content = {"facts": args.fact, "runs": [dataclasses.asdict(run) for run in runs]}
    write_report(args.output, format_report(runs, environment, args.fact), environment, content)


if __name__ == "__main__":
    main()
