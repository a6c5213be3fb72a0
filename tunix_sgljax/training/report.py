"""Reports of a training run: a line per step, a table, a JSON file, and a plot.

Plots need matplotlib, which is imported on use.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

WINDOW = 10  # steps over which rewards are averaged


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of training.

    Attributes:
        step: Number of the step, from 1.
        reward: The mean reward of the step's completions.
        rollout_s: Seconds in `generate`.
        num_tokens: Tokens generated in that time.
        step_s: Seconds of the whole step, rollout and training.
        weight_version: Version of the weights that sampled, if the engine counts them.
    """

    step: int
    reward: float
    rollout_s: float
    num_tokens: int
    step_s: float
    weight_version: int | None

    @property
    def tokens_per_s(self) -> float:
        """The speed of the rollout."""
        return self.num_tokens / self.rollout_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """One evaluation on held-out prompts.

    Attributes:
        num_steps: Number of training steps before it.
        reward: The mean reward of its completions.
    """

    num_steps: int
    reward: float


class ProgressReporter:
    """One updating line on a terminal, a plain line per step elsewhere; nothing when quiet."""

    def __init__(self, num_steps: int, *, is_quiet: bool = False) -> None:
        self._num_steps = num_steps
        self._is_quiet = is_quiet
        self._bar = tqdm(
            total=num_steps,
            disable=is_quiet or not sys.stderr.isatty(),
            ncols=shutil.get_terminal_size().columns,
            bar_format="{n_fmt}/{total_fmt} [{elapsed}<{remaining}] |{bar:5}|{postfix}",
        )

    def show(self, record: StepRecord) -> None:
        """Reports a finished step."""
        if self._is_quiet:
            return
        weights = "-" if record.weight_version is None else record.weight_version
        line = (
            f"reward {record.reward:.3f}  {record.rollout_s:.2f} s  "
            f"{record.tokens_per_s:.0f} tokens/s  weights {weights}"
        )
        if self._bar.disable:
            step = f"{record.step:>{len(str(self._num_steps))}}/{self._num_steps}"
            sys.stdout.write(f"step {step}  {line}\n")
            sys.stdout.flush()
        else:
            self._bar.set_postfix_str(line, refresh=False)
            self._bar.update()

    def show_eval(self, record: EvalRecord) -> None:
        """Reports an evaluation between steps."""
        if self._is_quiet:
            return
        line = f"held out, after {record.num_steps} steps: reward {record.reward:.3f}"
        if self._bar.disable:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
        else:
            tqdm.write(line)

    def close(self) -> None:
        """Ends the line."""
        self._bar.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """A run in a few numbers.

    Attributes:
        first_reward: Mean reward of the first steps (at most `WINDOW`).
        last_reward: Mean reward of the last steps (at most `WINDOW`).
        rollout_s: Median seconds of a rollout, the first step (which compiles) left out.
        tokens_per_s: Median speed of a rollout, likewise.
        step_s: Median seconds of a step, likewise.
        total_s: Seconds of all steps.
    """

    first_reward: float
    last_reward: float
    rollout_s: float
    tokens_per_s: float
    step_s: float
    total_s: float

    @property
    def gain(self) -> float:
        """How much the mean reward rose."""
        return self.last_reward - self.first_reward


def summarize(records: Sequence[StepRecord]) -> Summary:
    """Returns the run in a few numbers; `records` holds at least one step."""
    warm = records[1:] or records
    return Summary(
        first_reward=float(np.mean([record.reward for record in records[:WINDOW]])),
        last_reward=float(np.mean([record.reward for record in records[-WINDOW:]])),
        rollout_s=float(np.median([record.rollout_s for record in warm])),
        tokens_per_s=float(np.median([record.tokens_per_s for record in warm])),
        step_s=float(np.median([record.step_s for record in warm])),
        total_s=sum(record.step_s for record in records),
    )


def format_table(records: Sequence[StepRecord]) -> str:
    """Returns a row for every `WINDOW` steps: means, but medians of the times."""
    lines = ["    steps   reward   rollout s   tokens/s   step s"]
    for start in range(0, len(records), WINDOW):
        rows = records[start : start + WINDOW]
        steps = f"{rows[0].step}-{rows[-1].step}"
        reward = np.mean([record.reward for record in rows])
        rollout_s = np.median([record.rollout_s for record in rows])
        tokens_per_s = np.median([record.tokens_per_s for record in rows])
        step_s = np.median([record.step_s for record in rows])
        lines.append(
            f"{steps:>9}{reward:>9.3f}{rollout_s:>12.2f}{tokens_per_s:>11.0f}{step_s:>9.2f}"
        )
    return "\n".join(lines)


def format_summary(records: Sequence[StepRecord]) -> str:
    """Returns the run in one line; without a gain where the first steps are the last ones too."""
    summary = summarize(records)
    window = min(WINDOW, len(records))
    if len(records) < 2 * window:
        mean = np.mean([record.reward for record in records])
        return f"mean reward {mean:.3f} in {len(records)} step{'s' if len(records) > 1 else ''}"
    return (
        f"mean reward first {window} steps {summary.first_reward:.3f}, "
        f"last {window} steps {summary.last_reward:.3f}, gain {summary.gain:+.3f}"
    )


def write_json(
    path: Path,
    settings: dict[str, Any],
    records: Sequence[StepRecord],
    evals: Sequence[EvalRecord] = (),
) -> None:
    """Writes the settings of the run, its summary, every step and every evaluation."""
    summary = summarize(records)
    content = {
        "settings": settings,
        "summary": {**dataclasses.asdict(summary), "gain": summary.gain},
        "steps": [dataclasses.asdict(record) for record in records],
        "evaluations": [dataclasses.asdict(record) for record in evals],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_plot(
    path: Path, title: str, records: Sequence[StepRecord], evals: Sequence[EvalRecord] = ()
) -> None:
    """Draws the reward and the rollout time of every step, and the reward of evaluations.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = np.array([record.step for record in records])
    rewards = np.array([record.reward for record in records])
    seconds = np.array([record.rollout_s for record in records])
    window = min(WINDOW, len(records))
    mean = [rewards[max(0, end - window) : end].mean() for end in range(1, len(rewards) + 1)]
    median = summarize(records).rollout_s

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)  # whatever backend the process uses otherwise
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    figure.suptitle(title, fontsize=13)
    top.plot(steps, rewards, "o-", color="tab:blue", alpha=0.35, markersize=3, label="each step")
    label = f"mean of the last {window} steps"
    top.plot(steps, mean, color="tab:blue", linewidth=2.5, label=label)
    if evals:
        at = [record.num_steps + 0.5 for record in evals]
        top.plot(at, [record.reward for record in evals], "D-", color="tab:green", label="held out")
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
