"""The tables of a comparison with llama.cpp."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.lib.gguf_model import STORED_TYPES
from benchmarks.lib.llamacpp_peer import Settings
from benchmarks.lib.llamacpp_sides import OUR_OPTIONS, Run, is_disturbed
from tunix_sgljax.bench.shapes import MODELS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """One run of each side, one right after the other."""

    ours: Run
    peer: Run

    @property
    def ratio(self) -> float:
        """Our speed over llama.cpp's."""
        return self.peer.wall_s / self.ours.wall_s

    @property
    def other_load(self) -> float:
        """The larger load of other processes."""
        return max(self.ours.other_load or 0.0, self.peer.other_load or 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One workload.

    Attributes:
        workload: Its name.
        useful_tokens: Tokens of a run.
        trials: Settings of llama.cpp that were tried, with their seconds, in order.
        settings: The fastest of them.
        num_agreed: Greedy tokens that agree.
        num_compared: Greedy tokens that follow equal tokens.
        used: Pairs in the table.
        left_out: Pairs that other processes disturbed more.
    """

    workload: str
    useful_tokens: int
    trials: list[tuple[Settings, float]]
    settings: Settings
    num_agreed: int
    num_compared: int
    used: list[Pair]
    left_out: list[Pair]

    def row(self) -> str:
        """A line of the table."""
        ratios = [pair.ratio for pair in self.used]
        ours, peer = ([getattr(pair, side) for pair in self.used] for side in ("ours", "peer"))
        cells = [
            self.workload,
            *(f"{np.median([run.wall_s for run in runs]):.3f}" for runs in (ours, peer)),
            f"{np.median(ratios):.3f}",
            f"{min(ratios):.3f} to {max(ratios):.3f}",
            *(f"{np.median([run.cpu_s for run in runs]):.3f}" for runs in (ours, peer)),
            f"{max(pair.other_load for pair in self.used):.1%}",
            f"{len(self.used)}, {sum(is_disturbed(pair.other_load) for pair in self.used)}",
            f"{self.num_agreed} of {self.num_compared}",
        ]
        return f"| {' | '.join(cells)} |"


_HEAD = (
    "| workload | ours, s | llama.cpp, s | our speed over llama.cpp's, median pair | smallest to "
    "largest | CPU, ours, s | CPU, llama.cpp, s | largest load of others | pairs, disturbed ones "
    "| greedy tokens that agree |",
    "|---|---:|---:|---:|---|---:|---:|---:|---|---|",
)


def report_lines(
    args: argparse.Namespace, facts: Mapping[str, Any], results: Sequence[Result]
) -> list[str]:
    """The tables: results, then the settings that were tried."""
    lines = [*_HEAD, *(result.row() for result in results), ""]
    lines += ["## Settings of llama.cpp", ""]
    lines += ["Seconds of one run; of short or disturbed ones, the best of three.", ""]
    lines += ["| workload | settings | s | |", "|---|---|---:|---|"]
    for result in results:
        for settings, seconds in result.trials:
            mark = "chosen" if settings == result.settings else ""
            lines.append(f"| {result.workload} | {settings.in_words()} | {seconds:.3f} | {mark} |")
    stored = STORED_TYPES[args.dtype]
    return [
        f"- llama.cpp: llama-cpp-python {facts['version']}, {facts['system'].strip(' |')}; "
        f"weights in {stored}, KV cache in float16",
        f"- Ours: {OUR_OPTIONS[args.dtype]}, the other options at their defaults",
        f"- Model: {MODELS[args.model].in_words}, random weights; greedy on both sides",
        *(["- Quick sizes: no result"] if args.quick else []),
        "",
        *lines,
    ]
