"""Draws runs of grpo_reasoning.py: their rewards, over steps and over time.

python examples/reasoning_plot.py training.svg outputs/sgljax outputs/vanilla
"""

from __future__ import annotations

import no_advice as no_advice  # isort: skip

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

RECORDS = "records.json"
"""The file of a run, in its folder."""

WINDOW = 5
"""Steps over which the rewards of samples are averaged."""

Curve = tuple[str, Sequence[Any], Sequence[Any]]
"""A run's name, its steps and its evaluations, with the fields of `Step` and `HeldOut`."""


def write_plot(path: Path, curves: Sequence[Curve]) -> None:
    """Draws runs; those of one name share a colour."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)  # whatever backend the process uses otherwise
    left, right = figure.subplots(1, 2, sharey=True)
    names = list(dict.fromkeys(name for name, _, _ in curves))
    for number, (name, steps, held_out) in enumerate(curves):
        color = f"C{names.index(name)}"
        label = name if number == [each[0] for each in curves].index(name) else None
        end_s = np.array([0.0, *(step.end_s for step in steps)])
        rewards = np.array([step.reward for step in steps])
        window = min(WINDOW, len(rewards))
        mean = [rewards[max(0, end - window) : end].mean() for end in range(1, len(rewards) + 1)]
        at = np.array([each.num_steps for each in held_out])
        held_out_rewards = [each.reward for each in held_out]
        for axes, xs, points in (
            (left, np.arange(1, len(steps) + 1), at),
            (right, end_s[1:] / 60, end_s[at] / 60),
        ):
            axes.plot(xs, mean, color=color, alpha=0.5, label=label and f"{label}, sampled")
            axes.plot(
                points, held_out_rewards, "o-", color=color, label=label and f"{label}, held out"
            )
    left.set_xlabel("step")
    right.set_xlabel("minutes of training")
    left.set_ylabel("reward")
    left.set_ylim(0, 1)
    right.legend(loc="lower right", frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
    figure.savefig(path, dpi=120)


def read_run(folder: Path) -> Curve:
    """A run's curve, from its `RECORDS`."""
    content = json.loads((folder / RECORDS).read_text(encoding="utf-8"))
    steps, held_out = (
        [SimpleNamespace(**each) for each in content[key]] for key in ("steps", "held_out")
    )
    return content["settings"]["rollout_engine"], steps, held_out


def main(argv: list[str]) -> int:
    """Draws the runs in some folders."""
    if len(argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    write_plot(Path(argv[0]), [read_run(Path(folder)) for folder in argv[1:]])
    print(f"wrote {argv[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
