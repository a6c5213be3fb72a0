"""Draws docs/images/engines.svg: a real model's training with either engine, and a step of it.

    python docs/make_engines_plot.py

From benchmarks/results/real_training.json, of `benchmarks/throughput/real_training.py`. A test
holds README's numbers against the same functions.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
ENGINES = {"sgljax": "tunix-sgljax", "vanilla": "Tunix's vanilla"}
SAMPLING = {"vanilla": "#ef6c00", "sgljax": "#1565c0"}
TRAINER = "#cfd8dc"

WINDOW = 4
"""Steps over which rewards are averaged."""


def read(name: str) -> dict[str, Any]:
    """A file of results."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


class Training(NamedTuple):
    """A whole training of the real model.

    Shape: minutes, rewards: [steps], when each step ends, and the mean reward of its completions.

    Attributes:
        sampling_s, trainer_s: Mean seconds of the steps after the first, which compiles: sampling
            with syncs of weights, and the rest.
    """

    minutes: np.ndarray
    rewards: np.ndarray
    sampling_s: float
    trainer_s: float


@functools.cache
def trainings() -> dict[str, list[Training]]:
    """The real model's trainings, by engine: the same seeds of each."""
    found: dict[str, list[Training]] = {engine: [] for engine in ENGINES}
    for run in read("real_training.json")["runs"]:
        steps = run["steps"]
        found[run["engine"]].append(
            Training(
                np.array([step["end_s"] / 60 for step in steps]),
                np.array([step["reward"] for step in steps]),
                statistics.fmean(step["rollout_s"] + step["sync_s"] for step in steps[1:]),
                statistics.fmean(step["trainer_s"] for step in steps[1:]),
            )
        )
    return found


class Step(NamedTuple):
    """Mean seconds of a step over an engine's trainings, each without its first step."""

    sampling_s: float
    trainer_s: float

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.sampling_s + self.trainer_s

    @property
    def share(self) -> float:
        """The part of the time that sampling takes."""
        return self.sampling_s / self.total_s


def steps() -> dict[str, Step]:
    """A step of each engine."""
    return {
        engine: Step(
            statistics.fmean(each.sampling_s for each in own),
            statistics.fmean(each.trainer_s for each in own),
        )
        for engine, own in trainings().items()
    }


def times_faster() -> float:
    """How many times as long vanilla's trainings take as ours, from the first step to the last."""
    minutes = {engine: sum(each.minutes[-1] for each in own) for engine, own in trainings().items()}
    return minutes["vanilla"] / minutes["sgljax"]


def draw() -> Figure:
    """Rewards over minutes on the left, a step's seconds on the right."""
    figure = Figure(figsize=(10, 3.4), layout="constrained", facecolor="#ffffff")
    left, right = figure.subplots(1, 2, width_ratios=(1.7, 1))
    _draw_rewards(left)
    _draw_steps(right)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_rewards(axes: Axes) -> None:
    every = [each for own in trainings().values() for each in own]
    longest = max(each.minutes[-1] for each in every)
    highest = max(_smoothed(each.rewards).max() for each in every)
    for engine, own in trainings().items():
        for each in own:
            rewards = _smoothed(each.rewards)
            axes.plot(each.minutes, rewards, color=SAMPLING[engine], linewidth=2.2)
            axes.plot(each.minutes[-1], rewards[-1], "o", color=SAMPLING[engine], markersize=7)
        end = max(each.minutes[-1] for each in own)
        axes.text(
            end,
            1.04 * highest,
            f"{ENGINES[engine]}\n{end:.0f} min",
            color=SAMPLING[engine],
            ha="right" if end == longest else "center",
            va="bottom",
            fontsize=11,
            weight="bold",
        )
    axes.set_ylim(0, 1.3 * highest)
    axes.set_xlim(0, 1.03 * longest)
    axes.set_xlabel("minutes of training")
    axes.set_ylabel("reward")
    title = f"The same training, {times_faster():.1f} times as fast"
    axes.set_title(title, fontsize=12, loc="left", weight="bold")


def _smoothed(rewards: np.ndarray) -> np.ndarray:
    """Means of up to `WINDOW` steps."""
    return np.array([rewards[max(0, i + 1 - WINDOW) : i + 1].mean() for i in range(len(rewards))])


def _draw_steps(axes: Axes) -> None:
    found = steps()
    for place, engine in enumerate(ENGINES):
        step = found[engine]
        axes.bar(place, step.trainer_s, color=TRAINER, width=0.6)
        axes.bar(place, step.sampling_s, bottom=step.trainer_s, color=SAMPLING[engine], width=0.6)
        middle = step.trainer_s + step.sampling_s / 2
        label = f"sampling {step.sampling_s:.0f}"
        axes.text(place, middle, label, ha="center", va="center", color="w", fontsize=10)
        label = f"trainer {step.trainer_s:.0f}"
        axes.text(place, step.trainer_s / 2, label, ha="center", va="center", fontsize=10)
        axes.text(
            place, step.total_s, f"{step.total_s:.0f} s", ha="center", va="bottom", weight="bold"
        )
    axes.set_xticks(range(len(ENGINES)), list(ENGINES.values()), fontsize=11)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_ylim(0, 1.1 * max(step.total_s for step in found.values()))
    axes.set_title("Seconds of a step", fontsize=12, loc="left", weight="bold")


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
