"""What is measured, behind one interface: our engine, and what a user could take instead.

All peers sample from the same weights at temperature 1 without filters, and answer the same
requests. Only ours can be told how long each request is. The others decode a batch to its longest
request; so does a micro-batch here, which favours them: in training nobody knows that length, and
a micro-batch is decoded until its last row has ended.
"""

from __future__ import annotations

import importlib.util
import time
from typing import Any, Literal, Protocol

from tunix.models.qwen3.model import Qwen3

from batch_peers import TRANSFORMERS, VANILLA, TransformersPeer, VanillaPeer, batches
from bench_models import BenchModel, IdTokenizer, make_torch_model
from sgljax_engine import SamplingParams
from tunix_sgljax import create_sgljax_rollout
from workloads import Workload

OURS = "sgljax"
PEERS = (VANILLA, TRANSFORMERS)
"""Names that `--peers` takes. Each runs as one whole batch, and in the best of some micro-batches
if that promises to be faster."""

_PROBE_STEPS = 16
_MICRO_BATCHES = (8, 16, 32, 64)


class Peer(Protocol):
    """Something that answers a workload's requests.

    Attributes:
        name: What results are filed under, the same in every run.
        batch_size: Requests that it answers together; all others wait.
    """

    name: str
    batch_size: int

    def start(self, workload: Workload) -> None:
        """Compiles what the workload needs and produces a first token of its requests."""
        ...

    def generate(self, workload: Workload, *, is_greedy: bool = False) -> list[list[int]]:
        """Answers all requests; returns the tokens that each asked for."""
        ...

    def first_token_s(self, workload: Workload) -> list[float]:
        """Seconds from the call to the first token of each request."""
        ...

    def close(self) -> None:
        """Gives memory and threads back."""
        ...


class SglJaxPeer:
    """Our engine, with default options but the sizes of the workload."""

    name = OURS

    def __init__(
        self,
        model: Qwen3,
        workload: Workload,
        *,
        decode_steps: int = 64,
        weight_update_mode: Literal["retract", "in_place"] = "retract",
    ) -> None:
        """Builds the engine; its programs are compiled by `start` or on first use."""
        self.batch_size = workload.num_rows
        self.rollout = create_sgljax_rollout(
            model,
            IdTokenizer(),
            max_model_len=workload.max_model_len,
            max_running_requests=workload.num_rows,
            decode_steps=decode_steps,
            weight_update_mode=weight_update_mode,
        )
        self.engine = self.rollout.engine

    def start(self, workload: Workload) -> None:
        """See `Peer`."""
        self.engine.warmup()
        self.first_token_s(workload)

    def generate(self, workload: Workload, *, is_greedy: bool = False) -> list[list[int]]:
        """See `Peer`. The prefix cache is emptied before: no run helps the next one."""
        self.engine.flush_cache()
        params = _sampling_params(workload, temperature=0.0 if is_greedy else 1.0)
        outputs = self.engine.generate_requests(workload.requests, params)
        return [output.output_ids for output in outputs]

    def first_token_s(self, workload: Workload) -> list[float]:
        """See `Peer`. Measured on streams: a token counts when the caller has it."""
        self.engine.flush_cache()
        seconds: dict[int, float] = {}
        start = time.perf_counter()
        pieces = self.engine.generate(
            input_ids=workload.requests,
            sampling_params=_sampling_params(workload, temperature=1.0),
            stream=True,
        )
        for piece in pieces:
            seconds.setdefault(piece["index"], time.perf_counter() - start)
            if len(seconds) == len(workload.output_lengths):
                break
        pieces.close()
        return [seconds[index] for index in range(len(seconds))]

    def close(self) -> None:
        """See `Peer`."""
        self.rollout.close()


def _sampling_params(workload: Workload, temperature: float) -> list[SamplingParams]:
    return [
        SamplingParams(max_new_tokens=length, ignore_eos=True, temperature=temperature)
        for length in workload.output_lengths
    ]


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
            return VanillaPeer(self._model, self._bench_model, workload, batch_size)
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
