"""Times a run, and checks that two peers do the same work."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable

from benchmarks.lib.peers import Peer
from benchmarks.lib.workloads import Workload

_NUM_GREEDY_PROMPTS, _NUM_GREEDY_TOKENS = 4, 8
_SETTLE_S = 0.2


def timed(peer: Peer, workload: Workload) -> float:
    """Seconds of one run, started when other peers' threads have gone to sleep."""
    gc.collect()
    time.sleep(_SETTLE_S)
    start = time.perf_counter()
    outputs = peer.generate(workload)
    seconds = time.perf_counter() - start
    lengths = tuple(map(len, outputs))
    if lengths != workload.output_lengths:
        raise AssertionError(f"{peer.name} answered {lengths}, not {workload.output_lengths}")
    return seconds


def run_pairs(
    ours: Peer, peer: Peer, workload: Workload, num_pairs: int, tell: Callable[[str], None]
) -> tuple[list[float], list[float]]:
    """Seconds of our runs and of the peer's, in pairs whose order alternates; both are compiled."""
    runs: dict[str, list[float]] = {ours.name: [], peer.name: []}
    for pair in range(num_pairs):
        for runner in (ours, peer) if pair % 2 == 0 else (peer, ours):
            runs[runner.name].append(timed(runner, workload))
        ratio = runs[peer.name][-1] / runs[ours.name][-1]
        tell(f"  {peer.name}: {runs[peer.name][-1]:.2f} s, {ratio:.2f} times ours")
    return runs[ours.name], runs[peer.name]


def agreed_tokens(ours: Peer, peer: Peer, workload: Workload) -> tuple[list[int], int]:
    """For some prompts, the number of leading greedy tokens that both share, and the total."""
    count = min(_NUM_GREEDY_TOKENS, workload.max_output_len)
    prompts = workload.prompts[:_NUM_GREEDY_PROMPTS]
    few = dataclasses.replace(
        workload, prompts=prompts, num_samples=1, output_lengths=(count,) * len(prompts)
    )
    agreed: list[int] = []
    outputs = ours.generate(few, is_greedy=True), peer.generate(few, is_greedy=True)
    for our_ids, their_ids in zip(*outputs, strict=True):
        same = [a == b for a, b in zip(our_ids, their_ids, strict=True)]
        agreed.append(same.index(False) if False in same else count)
    return agreed, count


def count_agreed(ours: Peer, peer: Peer, workload: Workload) -> tuple[int, int]:
    """The number of equal greedy tokens of `agreed_tokens`, and the total.

    Raises:
        AssertionError: when a first token differs, so that the work is not the same.
    """
    agreed, count = agreed_tokens(ours, peer, workload)
    if 0 in agreed:
        raise AssertionError(
            f"first greedy tokens of {peer.name} differ: {agreed} of {count} leading ones agree"
        )
    return sum(agreed), count * len(agreed)
