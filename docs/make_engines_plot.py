"""Draws docs/images/engines.svg: a training's minutes with either engine, and speed of sampling.

    python docs/make_engines_plot.py

From benchmarks/results: `real_training.json` (see `benchmarks/throughput/real_training.py`), and
for speeds `gpu.json`, `grpo_addition.json` and `bench_small.json`. A test holds
README's numbers against the same functions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
ENGINES = {"vanilla": "Tunix's vanilla", "sgljax": "tunix-sgljax"}
SAMPLING = {"vanilla": "#ef6c00", "sgljax": "#1565c0"}
TRAINER = "#cfd8dc"


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
    """The speeds, the largest first."""
    gpu, small = read("gpu.json"), read("bench_small.json")
    demo = read("grpo_addition.json")
    rate = {each["contestant"]: each["useful tokens/s"] for each in gpu["rollouts"]}
    own = {name: [] for name in ENGINES}
    for run in demo["runs"]:
        own[run["rollout"]].append(run["rollout_s"])
    found = [
        Speed(
            "Qwen3-0.6B, answers of 16 to 512 tokens",
            rate["engine, pallas"] / rate["vanilla"],
            machine(gpu["environment"]),
            gpu["environment"]["date"],
        ),
        Speed(
            "2.4M, answers of about 20 tokens",
            statistics.fmean(own["vanilla"]) / statistics.fmean(own["sgljax"]),
            machine(demo["environment"]),
            demo["environment"]["date"],
        ),
    ]
    words = {
        "rl_longtail": "27M, answers of 16 to 256 tokens",
        "long_prompt": "27M, prompts of 2,048 tokens",
    }
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
    return sorted(found, key=lambda each: -each.times)


class Parts(NamedTuple):
    """A whole training: its sampling, syncs of weights with it, and all else; in seconds."""

    sampling_s: float
    trainer_s: float

    @property
    def total_s(self) -> float:
        """The training from its first step to its last."""
        return self.sampling_s + self.trainer_s

    @property
    def share(self) -> float:
        """The part of the time that sampling takes."""
        return self.sampling_s / self.total_s


def trainings() -> dict[str, Parts]:
    """The real model's trainings by engine: those of seed 0, which ran with little beside them."""
    return {
        run["engine"]: Parts(
            sum(step["rollout_s"] + step["sync_s"] for step in run["steps"]),
            sum(step["trainer_s"] for step in run["steps"]),
        )
        for run in read("real_training.json")["runs"]
        if run["seed"] == 0
    }


def draw() -> Figure:
    """A training's minutes on the left, speeds of sampling on the right."""
    figure = Figure(figsize=(10, 3.4), layout="constrained", facecolor="#ffffff")
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _draw_trainings(left)
    _draw_speeds(right)
    for axes in (left, right):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    return figure


def _draw_trainings(axes: Axes) -> None:
    found = trainings()
    for place, name in enumerate(reversed(ENGINES)):
        parts = found[name]
        sampling, trainer = parts.sampling_s / 60, parts.trainer_s / 60
        axes.barh(place, sampling, color=SAMPLING[name], height=0.5)
        axes.barh(place, trainer, left=sampling, color=TRAINER, height=0.5)
        axes.text(sampling + trainer / 2, place, "trainer", va="center", ha="center", fontsize=10)
        label = f"sampling {sampling:.1f}"
        if parts.share > 0.2:
            axes.text(sampling / 2, place, label, va="center", ha="center", color="w", fontsize=10)
        else:
            axes.text(0, place + 0.33, label, va="center", color=SAMPLING[name], fontsize=10)
        axes.text(
            sampling + trainer + 0.15,
            place,
            f"{parts.total_s / 60:.1f} min",
            va="center",
            fontsize=11,
            weight="bold",
        )
    axes.set_yticks(range(len(ENGINES)), list(reversed(ENGINES.values())), fontsize=11)
    axes.set_ylim(-0.5, len(ENGINES) - 0.4)
    axes.set_xlim(0, 1.17 * max(parts.total_s for parts in found.values()) / 60)
    axes.set_xlabel("minutes")
    axes.set_title("The same 20 steps of GRPO, sooner", fontsize=12, loc="left", weight="bold")


def _draw_speeds(axes: Axes) -> None:
    bars = speeds()[::-1]
    places = range(len(bars))
    axes.barh(places, [each.times for each in bars], color=SAMPLING["sgljax"], height=0.5)
    for place, each in zip(places, bars, strict=True):
        text = f"{each.times:.1f} x"
        axes.text(each.times + 0.3, place, text, va="center", fontsize=11, weight="bold")
    axes.axvline(1, color=SAMPLING["vanilla"], linewidth=2)
    axes.text(1.3, len(bars) - 0.42, "vanilla's speed", color=SAMPLING["vanilla"], fontsize=9.5)
    labels = [f"{each.hardware}: {each.workload}" for each in bars]
    axes.set_yticks(places, [label.replace(": ", "\n") for label in labels], fontsize=9)
    axes.set_ylim(-0.5, len(bars) - 0.1)
    axes.set_xlim(0, 1.17 * max(each.times for each in bars))
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_title("More tokens per second", fontsize=12, loc="left", weight="bold")


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
