"""What a comparison measured, and its tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerResult:
    """One peer on one workload.

    Attributes:
        name: Of the peer.
        batch_size: Requests that it answers together.
        num_agreed: Leading greedy tokens of some prompts that are ours too; None for ours.
        first_token_s: Seconds to the first token, for each request.
        runs_s: Seconds of its runs.
        our_runs_s: Seconds of our engine's run in each pair.
    """

    name: str
    batch_size: int
    num_agreed: int | None
    first_token_s: list[float]
    runs_s: list[float]
    our_runs_s: list[float]

    @property
    def median_s(self) -> float:
        """Seconds of the median run."""
        return float(np.median(self.runs_s))

    @property
    def ratios(self) -> list[float]:
        """For each pair, the peer's seconds over ours."""
        return [theirs / ours for theirs, ours in zip(self.runs_s, self.our_runs_s, strict=True)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkloadResult:
    """All peers on one workload.

    Attributes:
        workload: Its name.
        num_requests: How many there are.
        num_rows: Requests that our engine decodes together at most.
        useful_tokens: Tokens asked for.
        step_bytes: That a decode step of them reads on average.
        read_bytes_per_s: Rate at which the machine reads so many bytes over and over.
        limit_by_part_s: The least seconds that each part takes on this machine.
        peers: Ours first.
    """

    workload: str
    num_requests: int
    num_rows: int
    useful_tokens: int
    step_bytes: int
    read_bytes_per_s: float
    limit_by_part_s: dict[str, float]
    peers: list[PeerResult]

    @property
    def limit_s(self) -> float:
        """Seconds that the useful work takes at least."""
        return sum(self.limit_by_part_s.values())

    def tokens_per_s(self, peer: PeerResult) -> float:
        """Useful tokens a second in the peer's median run."""
        return self.useful_tokens / peer.median_s

    def limit_fraction(self, peer: PeerResult) -> float:
        """How much of the limit's speed the peer reaches."""
        return self.limit_s / peer.median_s

    def to_dict(self) -> dict[str, Any]:
        """Everything measured and what follows from it, for JSON."""
        data = dataclasses.asdict(self)
        for entry, peer in zip(data["peers"], self.peers, strict=True):
            entry["tokens_per_s"] = self.tokens_per_s(peer)
            entry["limit_fraction"] = self.limit_fraction(peer)
            entry["median_ratio"] = float(np.median(peer.ratios))
        return {**data, "limit_s": self.limit_s}


def format_comparison(results: Sequence[WorkloadResult]) -> list[str]:
    """Tables in Markdown."""
    lines = ["## Useful output tokens a second", ""]
    for result in results:
        lines += [
            f"### `{result.workload}`",
            "",
            f"{result.num_requests} requests, {result.useful_tokens} useful tokens; the limit is "
            f"{result.useful_tokens / result.limit_s:.0f} tokens/s ({result.limit_s:.2f} s). "
            f"A decode step reads {result.step_bytes / 1e6:.0f} MB on average, for which the "
            f"ceiling is {result.read_bytes_per_s / 1e9:.1f} GB/s.",
            "",
            "| peer | batch | useful tokens/s | our speed over its, median pair (smallest, largest)"
            " | of the limit | first token, s: median, last | run, s |",
            "|---|---:|---:|---:|---:|---:|---:|",
            *(_row(result, index, peer) for index, peer in enumerate(result.peers)),
            "",
        ]
    return lines


def _row(result: WorkloadResult, index: int, peer: PeerResult) -> str:
    ratios = peer.ratios
    factor = f"{np.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})" if index else ""
    median, last = np.median(peer.first_token_s), max(peer.first_token_s)
    return (
        f"| {peer.name} | {peer.batch_size} | {result.tokens_per_s(peer):.0f} | {factor} "
        f"| {result.limit_fraction(peer):.1%} | {median:.2f}, {last:.2f} "
        f"| {peer.median_s:.2f} |"
    )
