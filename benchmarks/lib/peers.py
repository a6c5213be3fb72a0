"""What is measured, behind one interface: our engine, and what a user could take instead.

All peers sample from the same weights at temperature 1 without filters, and answer the same
requests. Only ours can be told how long each request is. The others decode a batch to its longest
request; so does a micro-batch here, which favours them: in training nobody knows that length, and
a micro-batch is decoded until its last row has ended.
"""

from __future__ import annotations

import importlib.util
import time
from typing import Any

from tunix.models.qwen3.model import Qwen3

from benchmarks.lib.batch_peers import TRANSFORMERS, TransformersPeer
from benchmarks.lib.torch_model import make_torch_model
from tunix_sgljax.bench.peers import OURS, Peer, SglJaxPeer
from tunix_sgljax.bench.shapes import BenchModel
from tunix_sgljax.bench.vanilla import VANILLA, VanillaPeer, batches
from tunix_sgljax.bench.workloads import Workload

PEERS = (VANILLA, TRANSFORMERS)
"""Names that `--peers` takes. Each runs as one whole batch, and in the best of some micro-batches
if that promises to be faster."""

_PROBE_STEPS = 16
_MICRO_BATCHES = (8, 16, 32, 64)


def missing_reason(peer: str) -> str | None:
    """Why a peer cannot run here; None if it can."""
    if peer == TRANSFORMERS and importlib.util.find_spec("torch") is None:
        return "torch is not installed (pip install torch)"
    return None


class PeerFactory:
    """Makes peers on one set of weights; the torch copy of them exists once, if at all."""

    def __init__(self, model: Qwen3, bench_model: BenchModel) -> None:
        """Makes nothing yet."""
        self._model = model
        self._bench_model = bench_model
        self._torch_model: Any = None

    def make(self, name: str, workload: Workload, batch_size: int | None = None) -> Peer:
        """Makes a peer for a workload.

        Args:
            name: `OURS` or one of `PEERS`.
            workload: The largest that it will run.
            batch_size: Requests in a micro-batch; None for all. Not for ours.

        Raises:
            ValueError: for an unknown name.
        """
        if name == OURS:
            return SglJaxPeer(self._model, workload)
        if name == VANILLA:
            return VanillaPeer(self._model, self._bench_model.config, workload, batch_size)
        if name == TRANSFORMERS:
            if self._torch_model is None:
                self._torch_model = make_torch_model(self._model, self._bench_model.config)
            return TransformersPeer(self._torch_model, workload, batch_size)
        raise ValueError(f"peer must be one of {[OURS, *PEERS]}, got {name!r}")

    def best_micro_batch(self, name: str, workload: Workload, whole_s: float) -> int | None:
        """The micro-batch size with the least estimated time; None if none beats `whole_s`.

        Tried are 8, 16, 32 and 64 requests, as far as there are more in all; of few requests, 1.
        The estimate comes from a run of the first micro-batch with one step and one with 17 steps.

        Args:
            name: Of the peer.
            workload: What it would run.
            whole_s: Seconds that the peer takes in one whole batch.
        """
        total = len(workload.output_lengths)
        sizes = [size for size in _MICRO_BATCHES if size < total] or [1] * (total > 1)
        seconds = {size: self._estimate_s(name, workload, size) for size in sizes}
        for size, estimate in seconds.items():
            print(f"  {name}, batches of {size}: about {estimate:.1f} s", flush=True)
        best = min(seconds, key=lambda size: seconds[size], default=None)
        return best if best is not None and seconds[best] < whole_s else None

    def _estimate_s(self, name: str, workload: Workload, size: int) -> float:
        peer = self.make(name, workload, size)
        prompts = workload.requests[:size]
        num_steps = min(1 + _PROBE_STEPS, workload.max_output_len)
        times: list[float] = []
        for count in (1, num_steps):
            probe = Workload(
                name=workload.name,
                prompts=tuple(map(tuple, prompts)),
                num_samples=1,
                output_lengths=(count,) * len(prompts),
                num_rows=len(prompts),
            )
            peer.generate(probe)  # compiles
            start = time.perf_counter()
            peer.generate(probe)
            times.append(time.perf_counter() - start)
        peer.close()
        step_s = (times[1] - times[0]) / (num_steps - 1)
        return sum(times[0] + (max(lengths) - 1) * step_s for _, lengths in batches(workload, size))
