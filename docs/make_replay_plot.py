"""Draws docs/images/replay.svg: GRPO with filters that leave out tokens, with replay and without.

    python docs/make_replay_plot.py    # what benchmarks/results/replay.json holds

Made by `benchmarks/exactness/replay.py`, which says what is measured.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/replay.json"
IMAGE = ROOT / "docs/images/replay.svg"
PANELS = {
    "reward": "reward",
    "kl": "KL to the start",
    "abs_log_ratio": "mean |log-ratio|",
}
WAYS = {"support": ("#1565c0", "with replay"), "off": ("#ef6c00", "without")}


def draw(trainings: list[dict[str, Any]]) -> Figure:
    """A row for each filter: the mean over seeds of each step, within the smallest and largest."""
    filters = list(dict.fromkeys(each["filters"] for each in trainings))
    figure = Figure(figsize=(10, 2.6 * len(filters)), layout="constrained", facecolor="#ffffff")
    grid = figure.subplots(len(filters), len(PANELS), sharex=True, squeeze=False)
    for row, name in zip(grid, filters, strict=True):
        for axes, (field, title) in zip(row, PANELS.items(), strict=True):
            for way, (colour, label) in WAYS.items():
                runs = [t["steps"] for t in trainings if (t["filters"], t["replay"]) == (name, way)]
                values = np.array([[step[field] for step in steps] for steps in runs])
                steps = np.arange(1, values.shape[1] + 1)
                axes.fill_between(
                    steps, values.min(0), values.max(0), color=colour, alpha=0.2, lw=0
                )
                axes.plot(steps, values.mean(0), color=colour, label=label)
            axes.set_title(f"{name}: {title}", fontsize=10, loc="left")
            axes.spines[["top", "right"]].set_visible(False)
            if field == "abs_log_ratio":
                axes.set_yscale("log")
    for axes in grid[-1]:
        axes.set_xlabel("step")
    grid[0, 0].legend(frameon=False, fontsize=9)
    return figure


def main() -> None:
    """Writes the picture."""
    mpl.rcParams.update({"svg.hashsalt": "tunix-sgljax", "svg.fonttype": "path"})
    content = json.loads(RESULT.read_text(encoding="utf-8"))
    draw(content["trainings"]).savefig(IMAGE, metadata={"Date": None})


if __name__ == "__main__":
    main()
