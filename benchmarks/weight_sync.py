"""How long new weights take, and how long running requests stand still for them."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
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
_STALLS_PER_COPY = 3
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
        stalls_s: For each update while requests decoded: what it added to the time between two of
            their dispatches; see `_stall_s`.
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


def _stall_s(peer: SglJaxPeer, workload: Workload, state: nnx.State) -> float:
    """The longest time between dispatches during an update half-way, less the median before it."""
    count = min(peer.batch_size, len(workload.requests))
    params = SamplingParams(
        max_new_tokens=workload.max_output_len, ignore_eos=True, detokenize=False
    )
    pieces = peer.engine.generate(
        input_ids=workload.requests[:count], sampling_params=[params] * count, stream=True
    )
    arrivals: list[float] = []
    times: list[float] = []  # when the update began, and when it ended

    def update() -> None:
        times.append(time.perf_counter())
        peer.rollout.update_params(state)
        times.append(time.perf_counter())

    updater = threading.Thread(target=update)
    num_tokens, is_updated = 0, False
    for piece in pieces:
        arrivals.append(time.perf_counter())
        num_tokens += len(piece["output_ids"])
        if not is_updated and num_tokens >= count * workload.max_output_len // 2:
            is_updated = True
            updater.start()
    updater.join()
    return stall_s(arrivals, *times, num_first=count)


def stall_s(arrivals: Sequence[float], began: float, ended: float, *, num_first: int) -> float:
    """The longest gap that touches the update, less the median gap between dispatches before it.

    Args:
        arrivals: When pieces of output came, in seconds, ascending: those of one dispatch together,
            with much shorter gaps than between dispatches.
        began: When the update began.
        ended: When it ended.
        num_first: Pieces whose gaps hold the prefill, which are left out.
    """
    starts, ends = np.array(arrivals[num_first:-1]), np.array(arrivals[num_first + 1 :])
    gaps = ends - starts
    before, during = gaps[ends < began], gaps[(ends >= began) & (starts <= ended)]
    if not (len(before) and len(during)):
        raise AssertionError(f"an update from {began} to {ended} is not amidst {arrivals}")
    between_dispatches = before[before > before.max() / 2]
    return float(during.max() - np.median(between_dispatches))


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
    _stall_s(peer, workload, state)  # compiles
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
        stalls_s += [_stall_s(peer, workload, state) for _ in range(_STALLS_PER_COPY)]
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
        "| what running requests stand still for it, ms | passes |",
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
