"""Draws the results of a folder and writes the page that shows them.

    python benchmarks/lib/plots.py [FOLDER]

Reads `bench_*.json` (compare.py), `step_parts_*.json` (step_parts.py), `growth.json` (growth.py)
and `grpo_speculation*.json` (grpo_speculation.py), as far as they are there, and the first lines of
every report.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from benchmarks.lib.reporting import ROOT

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# The same picture for the same numbers, byte by byte, and text that a browser can search.
_STYLE: dict[Any, Any] = {"svg.hashsalt": "tunix-sgljax", "svg.fonttype": "none", "font.size": 10}
_COLORS = {
    "sgljax": "tab:blue",
    "vanilla": "tab:orange",
    "vanilla, micro-batch": "#ffbb78",
    "transformers": "tab:green",
    "transformers, micro-batch": "#98df8a",
}
_PART_COLORS = ("#4878cf", "#ee854a", "#6acc64", "#d65f5f", "#956cb4", "#8c613c")


def _tidy(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _grouped_bars(
    axes: Axes, groups: Sequence[str], series: dict[str, list[float]], labels: str
) -> None:
    """Bars side by side in each group, with their values above; nan draws no bar."""
    width = 0.8 / len(series)
    places = np.arange(len(groups), dtype=float)
    for index, (name, values) in enumerate(series.items()):
        at = places + (index - (len(series) - 1) / 2) * width
        bars = axes.bar(at, values, width, label=name, color=_COLORS.get(name))
        texts = ["" if np.isnan(value) else format(value, labels) for value in values]
        axes.bar_label(bars, texts, fontsize=7, padding=1)
    axes.set_xticks(places, groups)
    axes.legend(frameon=False, fontsize=8)


def _by_peer(workloads: Sequence[dict[str, Any]], field: str) -> dict[str, list[float]]:
    names = dict.fromkeys(peer["name"] for workload in workloads for peer in workload["peers"])
    return {
        name: [
            next((peer[field] for peer in workload["peers"] if peer["name"] == name), np.nan)
            for workload in workloads
        ]
        for name in names
    }


def draw_comparison(data: dict[str, Any], path: Path) -> None:
    """Tokens a second, and fractions of the limit, of every peer on every workload."""
    workloads = data["workloads"]
    groups = [workload["workload"] for workload in workloads]
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(10, 7), layout="constrained")
    speeds = _by_peer(workloads, "tokens_per_s")
    _grouped_bars(top, groups, speeds, ".0f")
    top.set_yscale("log")
    limits = [workload["useful_tokens"] / workload["limit_s"] for workload in workloads]
    top.plot(groups, limits, "k_", markersize=60, label="limit")
    top.set_ylabel("useful tokens/s")
    _tidy(top, f"{data['model']['name']}: useful output tokens a second; the dash is the limit")
    fractions = _by_peer(workloads, "limit_fraction")
    _grouped_bars(bottom, groups, fractions, ".0%")
    bottom.set_ylabel("fraction of the limit")
    _tidy(bottom, "Fraction of the limit computed from measured ceilings")
    _save(figure, path)


def draw_starts(data: dict[str, Any], path: Path) -> None:
    """Cold and warm starts, and peaks of memory."""
    starts = data["starts"]
    names = list(dict.fromkeys(start["peer"] for start in starts))
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
    for is_warm, color in ((False, "tab:blue"), (True, "tab:orange")):
        seconds = [
            start["start_s"]
            for name in names
            for start in starts
            if start["peer"] == name and start["is_warm"] == is_warm
        ]
        at = np.arange(len(names)) + (0.2 if is_warm else -0.2)
        bars = left.bar(
            at, seconds, 0.4, color=color, label="warm cache" if is_warm else "empty cache"
        )
        left.bar_label(bars, [f"{value:.1f}" for value in seconds], fontsize=8)
    left.set_xticks(range(len(names)), names)
    left.set_ylabel("seconds")
    left.legend(frameon=False)
    _tidy(left, f"{data['model']['name']}: start to first tokens, `{data['start_workload']}`")
    warm = [start for start in starts if start["is_warm"]]
    right.bar(names, [start["peak_bytes"] / 1e6 for start in warm], color="tab:gray")
    right.bar(
        names,
        [start["weights_bytes"] / 1e6 for start in warm],
        color="lightgray",
        label="imports and the trainer's weights",
    )
    right.set_ylabel("MB")
    right.margins(y=0.2)
    right.legend(frameon=False, loc="upper left", fontsize=8)
    _tidy(right, "Peak resident memory")
    _save(figure, path)


def draw_parts(data: dict[str, Any], path: Path) -> None:
    """One bar for what a decode step takes, one for what its parts take at least."""
    figure, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
    parts = data["parts"]
    for row, field in enumerate(("limit_s", "measured_s")):
        left = 0.0
        for index, part in enumerate(parts):
            width = max(part[field], 0.0) * 1e3
            color = _PART_COLORS[index % len(_PART_COLORS)]
            label = part["part"] if row == 0 else None
            axes.barh(row, width, left=left, color=color, label=label)
            left += width
        total_ms = sum(part[field] for part in parts) * 1e3
        axes.text(left, row, f" {total_ms:.2f} ms", va="center")
    axes.set_yticks([0, 1], ["limit", "measured"])
    axes.set_xlabel("milliseconds a decode step")
    axes.margins(x=0.12)
    axes.legend(frameon=False, fontsize=8, ncols=len(parts), loc="upper center")
    axes.set_ylim(-0.5, 2.1)
    title = f"{data['model']['name']}: a decode step of {data['num_rows']} rows"
    _tidy(axes, f"{title}, {data['mean_context']:.0f} keys a row")
    _save(figure, path)


def draw_growth(series: dict[str, Any], path: Path) -> None:
    """Tokens a second against one size, a line a model."""
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for model, points in series["points"].items():
        sizes = [point["size"] for point in points]
        axes.plot(sizes, [point["tokens_per_s"] for point in points], "o-", label=model)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(series["size_name"])
    axes.set_ylabel("output tokens/s")
    axes.legend(frameon=False)
    _tidy(axes, series["title"])
    _save(figure, path)


def draw_speculation(data: dict[str, Any], path: Path) -> None:
    """Seconds of each step's rollout without drafts and with, and the acceptance by epoch."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 3.5), width_ratios=(3, 2), layout="constrained"
    )
    labels = {"off": "speculation off", "auto": "auto"}
    for (mode, steps), color in zip(data["steps"].items(), ("tab:gray", "tab:blue"), strict=True):
        milliseconds = [step["seconds"] * 1e3 for step in steps]
        numbers = range(1, len(steps) + 1)
        left.plot(numbers, milliseconds, "o-", color=color, markersize=3, label=labels[mode])
    for epoch in range(1, len(data["epochs"])):
        end = epoch * data["steps_per_epoch"] + 0.5
        left.axvline(end, color="black", linewidth=0.8, linestyle=":")
    left.set_ylim(bottom=0)
    left.set_xlabel("step; dotted lines are ends of epochs")
    left.set_ylabel("milliseconds")
    left.legend(frameon=False, fontsize=8)
    _tidy(left, "Rollout of a step, equal tokens")
    drafted = [epoch["drafted"] for epoch in data["epochs"]]
    names = [str(epoch["epoch"]) for epoch in data["epochs"]]
    below = np.zeros(len(names))
    for drafter, color in zip(drafted[0]["num_accepted"], _PART_COLORS, strict=False):
        shares = [each["num_accepted"][drafter] / each["num_tokens"] for each in drafted]
        right.bar(names, shares, 0.6, bottom=below, color=color, label=drafter)
        below += shares
    for place, each in enumerate(drafted):
        text = f"{each['acceptance_length']:.1f} tokens a step"
        right.annotate(text, (place, below[place]), ha="center", va="bottom", fontsize=8)
    right.yaxis.set_major_formatter("{x:.0%}")
    right.set_ylim(top=1.4 * max(below))
    right.set_xlabel("epoch")
    right.legend(frameon=False, fontsize=8, loc="upper left", ncols=3)
    _tidy(right, "Tokens that were right drafts")
    _save(figure, path)


def write_page(folder: Path) -> Path:
    """Draws everything in the folder and writes README.md, which shows it; returns its path."""
    with mpl.rc_context(_STYLE):
        return _write_page(folder)


def _made_on(environment: dict[str, Any]) -> str:
    return f"{environment['date']}, {environment['cpu']}, {environment['num_cores']} cores."


def _table(folder: Path) -> list[str]:
    """A row for each report, from its first lines; what they do not say stays empty."""
    lines = ["| file | what it measures | machine | date | command |", "|---|---|---|---|---|"]
    for path in sorted(folder.glob("*.md")):
        if path.name == "README.md":
            continue
        title, _, rest = path.read_text().partition("\n")
        head = " ".join(rest.partition("\n|")[0].split())
        machine = re.search(r"(?:Machine: |, on )([^,;]+, \d+ cores)", head)
        date = re.search(r"\d{4}-\d{2}-\d{2}", head)
        command = re.search(r"`((?:python )?[^` ]+\.py[^`]*)`", head)
        cells = [
            f"[{path.stem}]({path.name})",
            title.removeprefix("# "),
            machine[1] if machine else "",
            date[0] if date else "",
            f"`{command[1].removeprefix('python ')}`" if command else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _write_page(folder: Path) -> Path:
    lines = [
        "# Benchmark results",
        "",
        "Made by `benchmarks/lib/plots.py` from the files here: the current result of each model",
        "and machine. How to read them: [docs/benchmarks.md](../../docs/benchmarks.md).",
    ]
    if (folder / "archive").exists():
        lines += ["Older and superseded ones are in [the archive](archive/README.md)."]
    lines += ["", *_table(folder), ""]

    def show(title: str, name: str) -> None:
        lines.extend([f"![{title}]({name})", ""])

    for path in sorted(folder.glob("bench_*.json")):
        data = json.loads(path.read_text())
        lines += [f"## Model `{data['model']['name']}`", "", f"[The numbers]({path.stem}.md)."]
        lines += [_made_on(data["environment"]), ""]
        draw_comparison(data, folder / f"{path.stem}.svg")
        show("Tokens a second and fraction of the limit", f"{path.stem}.svg")
        if data["starts"]:
            draw_starts(data, folder / f"{path.stem}_start.svg")
            show("Start-up and memory", f"{path.stem}_start.svg")
    for path in sorted(folder.glob("step_parts_*.json")):
        data = json.loads(path.read_text())
        draw_parts(data, folder / f"{path.stem}.svg")
        lines += ["## Where a decode step goes", "", f"[The numbers]({path.stem}.md)."]
        lines += [_made_on(data["environment"]), ""]
        show("Parts of a decode step", f"{path.stem}.svg")
    growth = folder / "growth.json"
    if growth.exists():
        lines += ["## Growth", "", "[The numbers](growth.md).", ""]
        for series in json.loads(growth.read_text())["series"]:
            name = f"growth_{series['name']}.svg"
            draw_growth(series, folder / name)
            show(series["title"], name)
    for path in sorted(folder.glob("grpo_speculation*.json")):
        data = json.loads(path.read_text())
        lines += ["## GRPO with speculation", "", f"[The numbers]({path.stem}.md)."]
        lines += [_made_on(data["environment"]), ""]
        draw_speculation(data, folder / f"{path.stem}.svg")
        show("Rollouts and acceptance, epoch by epoch", f"{path.stem}.svg")
    page = folder / "README.md"
    page.write_text("\n".join(lines))
    return page


def main() -> None:
    """Draws one folder."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "benchmarks/results"
    print(f"wrote {write_page(folder)}")


if __name__ == "__main__":
    main()
