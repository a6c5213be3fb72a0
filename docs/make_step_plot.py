"""Draws docs/images/step_time.svg: the parts of a training step, and those of its rollout.

    python docs/make_step_plot.py    # what benchmarks/results/step_time.json holds

Made by `benchmarks/throughput/step_time.py`, which says what each part is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/step_time.json"
ROLLOUT = ("tokenize", "prefill", "decode", "host")
COLOURS = {
    "rollout": "#1565c0",
    "tokenize": "#90caf9",
    "prefill": "#1565c0",
    "decode": "#1e88e5",
    "host": "#0d2f5c",
    "log-probs": "#8e24aa",
    "trainer": "#90a4ae",
    "sync": "#ef6c00",
    "rest": "#cfd8dc",
}


def draw(content: dict[str, Any]) -> Figure:
    """The whole step above, its rollout below; means of all steps."""
    steps = content["steps"]
    mean = {
        name: statistics.fmean(step["parts"][name] for step in steps)
        for name in COLOURS
        if name != "rollout"
    }
    rollout = {name: mean.pop(name) for name in ROLLOUT}
    figure = Figure(figsize=(9, 3.4), layout="constrained", facecolor="#ffffff")
    above, below = figure.subplots(2, 1)
    environment = content["environment"]
    is_cpu = environment["device"] == "cpu"
    device = f"{environment['num_cores']} CPU cores" if is_cpu else environment["device"]
    _bar(above, {"rollout": sum(rollout.values()), **mean})
    _bar(below, rollout)
    above.set_title(f"A step ({device}, {environment['date']})", fontsize=10, loc="left")
    below.set_title("Its rollout", fontsize=10, loc="left")
    below.set_xlabel("seconds")
    return figure


def _bar(axes: Axes, parts: dict[str, float]) -> None:
    left, total = 0.0, sum(parts.values())
    for name, seconds in parts.items():
        label = f"{name} {seconds:.2f} s, {seconds / total:.1%}"
        axes.barh(0, seconds, left=left, color=COLOURS[name], label=label)
        left += seconds
    axes.set_xlim(0, total)
    axes.set_yticks([])
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    parser = argparse.ArgumentParser(description="Draws the parts of a training step.")
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/images/step_time.svg")
    args = parser.parse_args(argv)
    mpl.rcParams |= {"svg.fonttype": "path", "svg.hashsalt": "step_time"}
    draw(json.loads(args.result.read_text(encoding="utf-8"))).savefig(
        args.output, metadata={"Date": None}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
