"""Draws docs/images/long_tail.svg: rows in use during a step, by the simulator.

    python docs/make_long_tail_plot.py

64 rows, 256 requests, the table "h200" and the lengths that `python -m tools.simulation` takes by
default; the fifth step of a data set that has been gone through before.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from tools.simulation import WAYS, LognormalLengths, Plan, Simulation, find_table

IMAGE = Path(__file__).parent / "images/long_tail.svg"
SHOWN = ("first come", "longest first", "1.25 times, carry")
PLAN = Plan(num_groups=32, num_rows=64, num_prompts=64)
STEP = 4


def rows_in_use(way: str) -> tuple[list[float], list[int]]:
    """Seconds since the step's start, and the rows in use up to each."""
    events: list[tuple[float, int]] = []
    simulation = Simulation(
        dataclasses.replace(PLAN, **WAYS[way]),
        LognormalLengths(),
        find_table("h200"),
        watch=lambda now_s, num_rows: events.append((now_s, num_rows)),
    )
    start_s = 0.0
    for _ in simulation.steps(STEP):
        start_s = events[-1][0]
        events.clear()
    for _ in simulation.steps(1):
        pass
    return [now_s - start_s for now_s, _ in events], [num_rows for _, num_rows in events]


def draw() -> Figure:
    """A panel for each way, with one time axis."""
    figure = Figure(figsize=(9, 4.2), layout="constrained", facecolor="#ffffff")
    panels = figure.subplots(len(SHOWN), 1, sharex=True)
    for axes, way in zip(panels, SHOWN, strict=True):
        times_s, rows = rows_in_use(way)
        axes.stairs(rows, [0.0, *times_s], fill=True, color="#1e88e5")
        axes.axvline(times_s[-1], color="#ef6c00")
        axes.set(ylim=(0, PLAN.num_rows), ylabel="rows")
        axes.set_title(f"{way}: {times_s[-1]:.1f} s", fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("seconds")
    panels[-1].set_xlim(left=0)
    return figure


def main() -> None:
    """Writes the picture."""
    mpl.rcParams.update({"svg.hashsalt": "tunix-sgljax", "svg.fonttype": "path"})
    draw().savefig(IMAGE, metadata={"Date": None})


if __name__ == "__main__":
    main()
