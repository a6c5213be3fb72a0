"""Runs that take turns, so that other work on the machine disturbs all alike, and their table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sgljax_engine import Engine, SamplingParams


def timed(run: Callable[[], object]) -> float:
    """Seconds that `run` takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def generating(engine: Engine, prompts: Any, params: SamplingParams) -> Callable[[], object]:
    """A run that answers prompts (lists of token ids) from an empty prefix cache."""

    def generate() -> object:
        engine.flush_cache()
        return engine.generate_requests(prompts, params)

    return generate


def take_turns(
    runs: Mapping[str, Callable[[], Any]],
    num_turns: int,
    measure: Callable[[Callable[[], Any]], float] = timed,
) -> dict[str, list[float]]:
    """Seconds of each run in turns of alternating order, after an untimed run of each."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(-1, num_turns):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            took_s = measure(runs[name])
            seconds[name] += [took_s] if turn >= 0 else []
    return seconds


def speeds(seconds: Mapping[str, list[float]], base: str) -> dict[str, list[float]]:
    """Speed of each run over that of `base`, turn by turn."""
    return {
        name: [a / b for a, b in zip(seconds[base], each, strict=True)]
        for name, each in seconds.items()
    }


def speed_table(groups: Mapping[str, Mapping[str, list[float]]], base: str) -> list[str]:
    """A table of groups of runs: medians, and speeds over that of one of the runs.

    Args:
        groups: Seconds by name of the run, by name of the group.
        base: Name of the run in each group that the others are compared with.
    """
    lines = [
        f"| | run | median, s | speed over {base}: median turn | smallest to largest | turns |",
        "|---|---|---:|---:|---|---:|",
    ]
    for group, seconds in groups.items():
        for name, ratios in speeds(seconds, base).items():
            lines.append(
                f"| {group} | {name} | {np.median(seconds[name]):.4f} | {np.median(ratios):.3f} "
                f"| {min(ratios):.3f} to {max(ratios):.3f} | {len(ratios)} |"
            )
    return lines
