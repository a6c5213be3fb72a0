"""Draws a run of the demo: the reward of every step, and the seconds of its rollout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tunix_sgljax.training.report import WINDOW, StepRecord, summarize


def write_plot(path: Path, title: str, records: Sequence[StepRecord]) -> None:
    """Draws the reward and the rollout time of every step."""
    steps = np.array([record.step for record in records])
    rewards = np.array([record.reward for record in records])
    seconds = np.array([record.rollout_s for record in records])
    window = min(WINDOW, len(records))
    mean = [rewards[max(0, end - window) : end].mean() for end in range(1, len(rewards) + 1)]
    median = summarize(records)["rollout_s"]

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)  # whatever backend the process uses otherwise
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    figure.suptitle(title, fontsize=13)
    top.plot(steps, rewards, "o-", color="tab:blue", alpha=0.35, markersize=3, label="each step")
    label = f"mean of the last {window} steps"
    top.plot(steps, mean, color="tab:blue", linewidth=2.5, label=label)
    if rewards.min() >= 0 and rewards.max() <= 1:
        top.set_ylim(0, 1)
    top.set_ylabel("reward")
    top.legend(loc="lower right", frameon=False)
    bottom.bar(steps, seconds, color="tab:orange", width=0.8)
    bottom.axhline(median, color="black", linewidth=1, linestyle="--")
    # The first step compiles and would flatten all others.
    bottom.set_ylim(0, min(seconds.max(), 3 * median) * 1.1)
    bottom.set_ylabel("rollout, seconds")
    bottom.set_xlabel("step")
    bottom.set_title(f"median {median:.2f} s; the first step compiles", fontsize=10, loc="left")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
    figure.savefig(path, dpi=120)
