"""What a training run with tools tells about its steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt

WINDOW = 10  # steps over which a row of the table is averaged
NUM_COMPILING = 3  # first steps, which compile


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolStep:
    """One step of training.

    Attributes:
        step: From 1.
        reward: Mean reward of its episodes.
        turns: Mean turns of the policy in an episode: calls of the tool, and the answer.
        cached: Share of all turns' prompt tokens that came from the prefix cache.
        num_prompt_tokens: Of all turns, each with the whole conversation before it.
        step_s: Seconds from one weight sync to the next.
    """

    step: int
    reward: float
    turns: float
    cached: float
    num_prompt_tokens: int
    step_s: float


def summarize(steps: Sequence[ToolStep]) -> dict[str, float]:
    """Returns the run in a few numbers: means of its ends, and of the whole of it."""
    warm = steps[NUM_COMPILING:] or steps
    first, last = steps[:WINDOW], steps[-WINDOW:]
    return {
        "first_reward": float(np.mean([step.reward for step in first])),
        "last_reward": float(np.mean([step.reward for step in last])),
        "first_turns": float(np.mean([step.turns for step in first])),
        "last_turns": float(np.mean([step.turns for step in last])),
        "cached": sum(step.cached * step.num_prompt_tokens for step in steps)
        / sum(step.num_prompt_tokens for step in steps),
        "step_s": float(np.median([step.step_s for step in warm])),
        "total_s": sum(step.step_s for step in steps),
    }


def format_table(steps: Sequence[ToolStep]) -> str:
    """Returns a row for every `WINDOW` steps: means, but the median of the seconds."""
    lines = ["    steps   reward   turns   cached   step s"]
    for start in range(0, len(steps), WINDOW):
        rows = steps[start : start + WINDOW]
        reward, turns, cached = (
            np.mean([getattr(step, name) for step in rows])
            for name in ("reward", "turns", "cached")
        )
        span, step_s = f"{rows[0].step}-{rows[-1].step}", np.median([step.step_s for step in rows])
        lines.append(f"{span:>9}{reward:>9.3f}{turns:>8.2f}{cached:>9.0%}{step_s:>9.2f}")
    return "\n".join(lines)


def write_plot(path: Path, steps: Sequence[ToolStep]) -> None:
    """Draws the reward, the turns of an episode and the prefix cache's share, step by step."""
    numbers = [step.step for step in steps]
    panels = (
        ("reward", "reward", "tab:blue", (0, 1)),
        ("turns", "turns of an episode", "tab:green", None),
        ("cached", "prompt tokens from\nthe prefix cache", "tab:orange", (0, 1)),
    )
    figure, axes = plt.subplots(
        3, 1, figsize=(8, 7), sharex=True, height_ratios=(2, 1, 1), layout="constrained"
    )
    figure.suptitle("GRPO with a calculator", fontsize=13)
    for panel, (name, label, color, limits) in zip(axes, panels, strict=True):
        values = np.array([getattr(step, name) for step in steps])
        mean = [values[max(0, end - WINDOW) : end].mean() for end in range(1, len(values) + 1)]
        panel.plot(numbers, values, "o-", color=color, alpha=0.35, markersize=3, label="each step")
        panel.plot(
            numbers, mean, color=color, linewidth=2.5, label=f"mean of the last {WINDOW} steps"
        )
        if limits:
            panel.set_ylim(*limits)
        panel.set_ylabel(label)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.25)
    axes[0].legend(loc="lower right", frameon=False)
    axes[-1].set_xlabel("step")
    figure.savefig(path, dpi=120)
    plt.close(figure)
