"""Results of a user's own measurement, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from sgljax_engine import MemoryReport


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Another sampler on the same requests, in pairs of runs with ours.

    Attributes:
        name: Name of the sampler.
        runs_s: Seconds of its runs.
        ratios: For each pair, how many times as long it took as ours.
        num_agreed: Leading greedy tokens of some prompts that are equal with both.
        num_greedy: Total number of these tokens.
    """

    name: str
    runs_s: Sequence[float]
    ratios: Sequence[float]
    num_agreed: int
    num_greedy: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """Results of one workload.

    Attributes:
        workload: Its name.
        num_requests: Its requests.
        useful_tokens: Tokens that they ask for.
        runs_s: Seconds of our runs.
        first_token_s: Seconds from the call to the first token, for each request of our last run.
        latency_s: The same to its last token.
        start_s: Seconds from making the engine to the first tokens, with what it compiled.
        compile_s: Seconds of it spent compiling, or reading compiled programs from the cache.
        num_compiles: Number of compiled programs.
        memory: Memory that the engine took.
        against: Another sampler.
    """

    workload: str
    num_requests: int
    useful_tokens: int
    runs_s: Sequence[float]
    first_token_s: Sequence[float]
    latency_s: Sequence[float]
    start_s: float
    compile_s: float
    num_compiles: int
    memory: MemoryReport
    against: Comparison | None = None

    def tokens_per_s(self, runs_s: Sequence[float]) -> float:
        """Useful tokens per second in the median of some runs."""
        return self.useful_tokens / statistics.median(runs_s)

    def to_dict(self) -> dict[str, Any]:
        """All fields and derived values."""
        values: dict[str, Any] = dataclasses.asdict(self)
        values["tokens_per_s"] = self.tokens_per_s(self.runs_s)
        if self.against is not None:
            values["against"] |= {
                "tokens_per_s": self.tokens_per_s(self.against.runs_s),
                "median_ratio": statistics.median(self.against.ratios),
            }
        return values


def format_table(measurements: Sequence[Measurement]) -> list[str]:
    """A Markdown table with a line for each workload."""
    columns = ["workload", "requests", "useful tokens/s", "first token s (median, longest)"]
    columns += ["latency s (median, longest)", "start s", "compile s", "KV cache MB"]
    against = measurements[0].against
    if against is not None:
        columns += [f"{against.name} tokens/s", f"times {against.name} (pairs)"]
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *map(_row, measurements)]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _row(measurement: Measurement) -> list[str]:
    memory, against = measurement.memory, measurement.against
    cells = [
        measurement.workload,
        str(measurement.num_requests),
        f"{measurement.tokens_per_s(measurement.runs_s):.1f}",
        _spread(measurement.first_token_s),
        _spread(measurement.latency_s),
        f"{measurement.start_s:.1f}",
        f"{measurement.compile_s:.1f}",
        f"{memory.kv_bytes / 1e6:.1f}",
    ]
    if against is not None:
        pairs = ", ".join(f"{ratio:.2f}" for ratio in against.ratios)
        cells.append(f"{measurement.tokens_per_s(against.runs_s):.1f}")
        cells.append(f"{statistics.median(against.ratios):.2f} ({pairs})")
    return cells


def _spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.3f}, {max(seconds):.3f}"
