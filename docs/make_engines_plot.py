"""Draws docs/images/engines.svg: a real model's learning, and speed of rollouts against vanilla.

    python docs/make_engines_plot.py

From benchmarks/results: `real_training.json` (see `benchmarks/throughput/real_training.py`), and
for speeds `gpu.json`, `archive/grpo_addition.json` and `bench_small.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
ENGINES = {"vanilla": ("Tunix's vanilla", "#90a4ae"), "sgljax": ("tunix-sgljax", "#1565c0")}


class Speed(NamedTuple):
    """A workload: useful tokens a second of ours over vanilla's, and where it was measured."""

    workload: str
    times: float
    hardware: str
    date: str


def read(name: str) -> dict[str, Any]:
    """A file of results."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def machine(environment: dict[str, Any]) -> str:
    """The hardware of a result in a few words."""
    if environment["device"] == "cpu":
        return f"{environment['num_cores']} CPU cores"
    return environment["device"].removeprefix("NVIDIA ").split()[0] + " GPU"


def speeds() -> list[Speed]:
    """The speeds, the GPU's first."""
    gpu, small = read("gpu.json"), read("bench_small.json")
    demo = read("archive/grpo_addition.json")
    rate = {each["contestant"]: each["useful tokens/s"] for each in gpu["rollouts"]}
    own = {name: [] for name in ENGINES}
    for run in demo["runs"]:
        own[run["rollout"]].append(run["rollout_s"])
    found = [
        Speed(
            "Qwen3-0.6B, 16 to 512 tokens",
            rate["engine, pallas"] / rate["vanilla"],
            machine(gpu["environment"]),
            gpu["environment"]["date"],
        ),
        Speed(
            "the addition task, about 20 tokens",
            statistics.fmean(own["vanilla"]) / statistics.fmean(own["sgljax"]),
            machine(demo["environment"]),
            demo["environment"]["date"],
        ),
    ]
    training = read("real_training.json")
    alone = [run for run in training["runs"] if run["seed"] == 0]
    per_s = {
        run["engine"]: sum(step["num_tokens"] for step in run["steps"][1:])
        / sum(step["rollout_s"] for step in run["steps"][1:])
        for run in alone
    }
    found.append(
        Speed(
            "the task on the left, about 5 tokens",
            per_s["sgljax"] / per_s["vanilla"],
            machine(training["environment"]),
            training["environment"]["date"],
        )
    )
    words = {"rl_longtail": "27M, 16 to 256 tokens", "long_prompt": "27M, prompt of 2,048 tokens"}
    for workload in small["workloads"]:
        if workload["workload"] not in words:
            continue
        pairs = {
            peer["name"]: statistics.median(
                theirs / ours
                for theirs, ours in zip(peer["runs_s"], peer["our_runs_s"], strict=True)
            )
            for peer in workload["peers"]
        }
        best = min(times for name, times in pairs.items() if name.startswith("vanilla"))
        environment = small["environment"]
        found.append(
            Speed(
                words[workload["workload"]],
                best,
                machine(environment),
                environment["date"],
            )
        )
    order = ("GPU", "left", "addition", "16 to 256", "2,048")
    return sorted(
        found,
        key=lambda each: next(
            i for i, word in enumerate(order) if word in each.hardware or word in each.workload
        ),
    )


def draw() -> Figure:
    """Right answers on the left, speeds on the right."""
    training = read("real_training.json")
    figure = Figure(figsize=(10, 3.6), layout="constrained", facecolor="#ffffff")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    for name, (label, colour) in ENGINES.items():
        for number, run in enumerate(run for run in training["runs"] if run["engine"] == name):
            ends_s = [0.0, *(step["end_s"] for step in run["steps"])]
            minutes = [ends_s[each["num_steps"]] / 60 for each in run["held_out"]]
            shares = [each["share"] for each in run["held_out"]]
            left.plot(minutes, shares, "o-", color=colour, label=None if number else label)
    left.set(ylim=(0, 0.5), xlabel="minutes of training", ylabel="held-out problems, right")
    left.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    environment = training["environment"]
    title = f"SmolLM2-135M learns a task ({machine(environment)}, {environment['date']})"
    left.set_title(title, fontsize=10, loc="left")
    left.legend(loc="lower right", frameon=False, fontsize=9)

    bars = speeds()[::-1]
    places = range(len(bars))
    colour = ENGINES["sgljax"][1]
    right.barh(places, [each.times for each in bars], color=colour, height=0.55)
    for place, each in zip(places, bars, strict=True):
        right.text(each.times + 0.3, place, f"{each.times:.1f} x", va="center", fontsize=10)
    right.axvline(1, color=ENGINES["vanilla"][1], linewidth=2)
    labels = [f"{each.hardware}, {each.date}\n{each.workload}" for each in bars]
    right.set_yticks(places, labels, fontsize=8.5)
    right.set_xlim(0, 1.15 * max(each.times for each in bars))
    right.set_title(
        "Useful tokens/s over vanilla's at its best (the line)", fontsize=10, loc="left"
    )
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    parser = argparse.ArgumentParser(description="Draws ours against vanilla.")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/images/engines.svg")
    args = parser.parse_args(argv)
    mpl.rcParams |= {"svg.fonttype": "path", "svg.hashsalt": "engines"}
    draw().savefig(args.output, metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
