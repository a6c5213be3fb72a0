"""How long new weights take, and how long running requests stand still for them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, get_args

import jax
import numpy as np
from flax import nnx
from tunix.models.qwen3.model import Qwen3

from benchmarks.hardware.ceilings import measure_copy
from benchmarks.lib.peers import SglJaxPeer
from benchmarks.lib.turns import timed
from benchmarks.lib.workloads import Workload, make_workload
from sgljax_engine import SamplingParams
from sgljax_engine.observability.trace import RecordedEvent

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
        stalls_s: For each update while requests decoded: how long they stood still; see
            `find_stalls_s`.
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


def _run_with_updates(peer: SglJaxPeer, workload: Workload, state: nnx.State) -> list[float]:
    """Updates spread over a run: seconds that decoding requests stand still for each."""
    count = min(peer.batch_size, len(workload.requests))
    params = SamplingParams(
        max_new_tokens=workload.max_output_len, ignore_eos=True, detokenize=False
    )
    due = [count * workload.max_output_len * part for part in _UPDATES_AFTER]
    peer.engine.start_recording()
    pieces = peer.engine.generate(
        input_ids=workload.requests[:count], sampling_params=[params] * count, stream=True
    )
    num_tokens = 0
    with ThreadPoolExecutor(1) as pool:
        updates: list[Future[None]] = []
        for piece in pieces:
            num_tokens += len(piece["output_ids"])
            while len(updates) < len(due) and num_tokens >= due[len(updates)]:
                updates.append(pool.submit(peer.rollout.update_params, state))
    for update in updates:
        update.result()
    return find_stalls_s(peer.engine.stop_recording().events)


def find_stalls_s(events: Sequence[RecordedEvent]) -> list[float]:
    """For each swap of weights the time between the dispatches that decode before and after it.

    Less what is usual between two of them, the median. New weights are made within, or beside the
    dispatch before.

    Args:
        events: Of an engine's recording.
    """
    decodes = sorted((e.begin_s, e.end_s) for e in events if e.name == "decode")
    gaps = [(end, begin) for (_, end), (begin, _) in itertools.pairwise(decodes)]
    swaps = [e.begin_s for e in events if e.name == "swap weights"]
    is_swap = [any(end <= swap <= begin for swap in swaps) for end, begin in gaps]
    if sum(is_swap) != len(swaps):
        raise AssertionError(f"{len(swaps)} swaps, of which {sum(is_swap)} are between dispatches")
    lasting = np.array([begin - end for end, begin in gaps])
    usual_s = np.median(lasting[~np.array(is_swap)])
    return [float(each) for each in lasting[is_swap] - usual_s]


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
    state = nnx.state(model)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    found: dict[str, list[float]] = {"idle_s": [], "copies_s": [], "stalls_s": []}
    try:
        peer.rollout.update_params(state)  # compiles
        _run_with_updates(peer, workload, state)
        for _ in range(repeats):
            update = functools.partial(peer.rollout.update_params, state)
            updates_s = [timed(update) for _ in range(_UPDATES_PER_COPY)]
            found["idle_s"].append(float(np.median(updates_s)))
            found["copies_s"].append(num_bytes / measure_copy(num_bytes))
            found["stalls_s"] += _run_with_updates(peer, workload, state)
    finally:
        peer.close()
    return WeightSync(mode=mode, num_bytes=num_bytes, **found)


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
        "| running requests stand still for it, ms | passes |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for sync in syncs:
        stall_s, copy_s = float(np.median(sync.stalls_s)), float(np.median(sync.copies_s))
        lines.append(
            f"| {_FATES[sync.mode]} | {copy_s * 1e3:.1f} "
            f"| {np.median(sync.idle_s) * 1e3:.1f} | {sync.passes:.1f} "
            f"| {stall_s * 1e3:.1f} | {stall_s / copy_s:.1f} |"
        )
    return [*lines, ""]
