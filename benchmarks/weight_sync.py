"""How long new weights take, and how long running requests stand still for them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, get_args

import jax
import numpy as np
from flax import nnx
from tunix.models.qwen3.model import Qwen3

from ceilings import measure_copy
from sgljax_engine import SamplingParams
from tunix_sgljax.bench.peers import SglJaxPeer
from tunix_sgljax.bench.workloads import Workload, make_workload

_UPDATES_PER_COPY = 5
_UPDATES_AFTER = (1 / 4, 3 / 4)
"""Parts of all tokens; some of a benchmark's buckets of pages begin at 1/2."""

_DECODE_STEPS = 8
_NUM_TOKENS = 256

UpdateMode = Literal["retract", "in_place"]
"""What becomes of running requests: prefilled again under the new weights, or going on."""

_FATES: dict[UpdateMode, str] = {
    "retract": "retracted, and prefilled again",
    "in_place": "going on in place",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightSync:
    """Times of weight updates.

    Attributes:
        mode: What became of the running requests.
        num_bytes: Of the weights.
        idle_s: Seconds of an update with nothing running, the median of several in a row.
        copies_s: Seconds of one pass over the bytes at the copy bandwidth measured right after.
        stalls_s: For each update while requests decoded: what it added to the time of
            their dispatches; see `stall_s`.
    """

    mode: UpdateMode
    num_bytes: int
    idle_s: list[float]
    copies_s: list[float]
    stalls_s: list[float]

    @property
    def passes(self) -> float:
        """An idle update in passes over the bytes, the median of pairs."""
        return float(np.median(np.divide(self.idle_s, self.copies_s)))

    @property
    def copy_s(self) -> float:
        """The median pass."""
        return float(np.median(self.copies_s))


def _stalls_s(peer: SglJaxPeer, workload: Workload, state: nnx.State) -> list[float]:
    """What each of some updates, spread over a run, adds to the time of its dispatches."""
    count = min(peer.batch_size, len(workload.requests))
    params = SamplingParams(
        max_new_tokens=workload.max_output_len, ignore_eos=True, detokenize=False
    )
    pieces = peer.engine.generate(
        input_ids=workload.requests[:count], sampling_params=[params] * count, stream=True
    )
    arrivals: list[float] = []
    updates: list[Future[tuple[float, float]]] = []

    def update() -> tuple[float, float]:
        began = time.perf_counter()
        peer.rollout.update_params(state)
        return began, time.perf_counter()

    due = [count * workload.max_output_len * part for part in _UPDATES_AFTER]
    num_tokens = 0
    with ThreadPoolExecutor(1) as pool:
        for piece in pieces:
            arrivals.append(time.perf_counter())
            num_tokens += len(piece["output_ids"])
            while len(updates) < len(due) and num_tokens >= due[len(updates)]:
                updates.append(pool.submit(update))
    # Every dispatch gives a piece of each request; the first one came with the prefill.
    dispatches = arrivals[count::count]
    return [stall_s(dispatches, *update.result()) for update in updates]


def stall_s(dispatches: Sequence[float], began: float, ended: float) -> float:
    """What an update adds to the time from the dispatch before it to the one after the next.

    That is taken to be as long without it as dispatches are on average there: the two before and
    the two after. They grow longer with their contexts.

    Args:
        dispatches: When the output of each came, in seconds, ascending.
        began: When the update began.
        ended: When it ended.
    """
    # What requests do because of the update, such as a prefill, may come in the dispatch after it.
    first = int(np.searchsorted(dispatches, began)) - 1
    last = int(np.searchsorted(dispatches, ended)) + 1
    if first < 2 or last + 2 >= len(dispatches):
        raise AssertionError(f"{first} to {last} of {len(dispatches)} dispatches leave no others")
    before_s = dispatches[first] - dispatches[first - 2]
    after_s = dispatches[last + 2] - dispatches[last]
    usual_s = (before_s + after_s) / 4 * (last - first)
    return dispatches[last] - dispatches[first] - usual_s


def sync_workload(vocab_size: int, *, is_quick: bool = False) -> Workload:
    """Rows that decode for several dispatches before an update, and after it."""
    workload = make_workload("rl_uniform", vocab_size, is_quick=is_quick)
    return workload.with_lengths([_NUM_TOKENS] * len(workload.requests))


def measure_weight_sync(model: Qwen3, workload: Workload, *, repeats: int) -> list[WeightSync]:
    """Updates engines whose dispatches are short enough to see a stall, in each mode.

    Args:
        model: The trainer's, whose weights the engine gets each time.
        workload: What runs while it is updated; outputs should last for several dispatches.
        repeats: How often everything is measured.
    """
    return [_measure(model, workload, repeats, mode) for mode in get_args(UpdateMode)]


def _measure(model: Qwen3, workload: Workload, repeats: int, mode: UpdateMode) -> WeightSync:
    peer = SglJaxPeer(model, workload, decode_steps=_DECODE_STEPS, weight_update_mode=mode)
    peer.start(workload)
    try:
        return _measure_peer(peer, model, workload, repeats, mode)
    finally:
        peer.close()


def _measure_peer(
    peer: SglJaxPeer, model: Qwen3, workload: Workload, repeats: int, mode: UpdateMode
) -> WeightSync:
    state = nnx.state(model)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    peer.rollout.update_params(state)  # compiles
    _stalls_s(peer, workload, state)
    idle_s: list[float] = []
    copies_s: list[float] = []
    stalls_s: list[float] = []
    for _ in range(repeats):
        updates_s = []
        for _ in range(_UPDATES_PER_COPY):
            started = time.perf_counter()
            peer.rollout.update_params(state)
            updates_s.append(time.perf_counter() - started)
        idle_s.append(float(np.median(updates_s)))
        copies_s.append(num_bytes / measure_copy(num_bytes))
        stalls_s += _stalls_s(peer, workload, state)
    return WeightSync(
        mode=mode,
        num_bytes=num_bytes,
        idle_s=idle_s,
        copies_s=copies_s,
        stalls_s=stalls_s,
    )


def format_weight_sync(syncs: Sequence[WeightSync]) -> list[str]:
    """A section in Markdown."""
    lines = [
        "## Weight sync",
        "",
        f"{syncs[0].num_bytes / 1e6:.0f} MB; one pass is that over them at the copy bandwidth, "
        f"measured beside the updates. Medians of {len(syncs[0].idle_s)}, of stalls of "
        f"{len(syncs[0].stalls_s)}:",
        "",
        "| running requests are | one pass, ms | update of an idle engine, ms | passes "
        "| what it adds to the time of running requests, ms | passes |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for sync in syncs:
        stall_s = float(np.median(sync.stalls_s))
        lines.append(
            f"| {_FATES[sync.mode]} | {sync.copy_s * 1e3:.1f} "
            f"| {np.median(sync.idle_s) * 1e3:.1f} | {sync.passes:.1f} "
            f"| {stall_s * 1e3:.1f} | {stall_s / sync.copy_s:.1f} |"
        )
    return [*lines, ""]
