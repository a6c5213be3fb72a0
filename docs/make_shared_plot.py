"""Draws docs/images/shared_prompts.svg: KV bytes of a decode step over the size of groups.

    python docs/make_shared_plot.py

From benchmarks/results/shared_bytes.json.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

DOCS = Path(__file__).parent
IMAGE = DOCS / "images/shared_prompts.svg"
DATA = DOCS.parent / "benchmarks/results/shared_bytes.json"
COLORS = {"GPU": "#1e88e5", "TPU": "#43a047"}


def draw() -> Figure:
    """One line a kernel, below that of rows which each read their own."""
    found = json.loads(DATA.read_text(encoding="utf-8"))["bytes"]
    sizes = [int(size) for size in found["GPU"]]
    figure = Figure(figsize=(7, 3.2), layout="constrained", facecolor="#ffffff")
    axes = figure.subplots()

    def megabytes(kernel: str, name: str) -> list[float]:
        return [each[name] / 1e6 for each in found[kernel].values()]

    axes.plot(sizes, megabytes("GPU", "alone"), "o-", color="#9e9e9e", label="each row alone")
    for kernel, color in COLORS.items():
        shared = megabytes(kernel, "shared")
        axes.plot(sizes, shared, "o-", color=color, label=f"shared, {kernel} kernels")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set(xlabel="samples of a prompt", ylabel="MB a step, a layer", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def main() -> None:
    """Writes the picture."""
    mpl.rcParams.update({"svg.hashsalt": "tunix-sgljax", "svg.fonttype": "path"})
    draw().savefig(IMAGE, metadata={"Date": None})


if __name__ == "__main__":
    main()
