"""The interface of measured samplers, and this engine behind it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from benchmarks.lib.shapes import IdTokenizer
from benchmarks.lib.workloads import Workload
from sgljax_engine import Engine, RequestOutput, SamplingParams

OURS = "sgljax"


class Peer(Protocol):
    """A sampler that answers a workload's requests.

    Attributes:
        name: Name for results, the same in every run.
        batch_size: Number of requests that it answers together; all others wait.
    """

    name: str
    batch_size: int

    def start(self, workload: Workload) -> None:
        """Compiles all programs of the workload and produces a first token of its requests."""
        ...

    def generate(self, workload: Workload, *, is_greedy: bool = False) -> list[list[int]]:
        """Answers all requests; returns the tokens of each."""
        ...

    def first_token_s(self, workload: Workload) -> list[float]:
        """Seconds from the call to the first token of each request."""
        ...

    def close(self) -> None:
        """Releases memory and threads."""
        ...


class EnginePeer:
    """An engine as a peer."""

    name = OURS

    def __init__(self, engine: Engine, num_rows: int) -> None:
        """Takes an engine that decodes at most `num_rows` requests together."""
        self.engine, self.batch_size = engine, num_rows
        self.outputs: list[RequestOutput] = []
        """Outputs of the last `generate`."""

    def start(self, workload: Workload) -> None:
        """Compiles all programs, and produces a first token of each request."""
        self.engine.warmup()
        self.first_token_s(workload)

    def generate(self, workload: Workload, *, is_greedy: bool = False) -> list[list[int]]:
        """Answers all requests, from an empty prefix cache, so that no run helps the next one."""
        self.engine.flush_cache()
        params = _sampling_params(workload, temperature=0.0 if is_greedy else 1.0)
        self.outputs = self.engine.generate_requests(workload.requests, params)
        return [output.output_ids for output in self.outputs]

    def first_token_s(self, workload: Workload) -> list[float]:
        """Seconds to the first token, measured on streams: it counts when the caller has it."""
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
        """Shuts the engine down."""
        self.engine.shutdown()


class SglJaxPeer(EnginePeer):
    """The engine as the rollout of a Tunix model, with default options except workload sizes."""

    def __init__(
        self,
        model: Any,
        workload: Workload,
        *,
        decode_steps: int = 64,
        weight_update_mode: Literal["retract", "in_place"] = "retract",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Builds the engine for the largest workload that it will run.

        Its programs are compiled by `start` or on first use. `options` are the engine's.
        """
        from tunix_sgljax import create_sgljax_rollout

        self.rollout = create_sgljax_rollout(
            model,
            IdTokenizer(),
            max_model_len=workload.max_model_len,
            weight_update_mode=weight_update_mode,
            **{
                "max_running_requests": workload.num_rows,
                "decode_steps": decode_steps,
                **(options or {}),
            },
        )
        super().__init__(self.rollout.engine, workload.num_rows)

    def close(self) -> None:
        """Closes the rollout."""
        self.rollout.close()


def _sampling_params(workload: Workload, temperature: float) -> list[SamplingParams]:
    return [
        SamplingParams(max_new_tokens=length, ignore_eos=True, temperature=temperature)
        for length in workload.output_lengths
    ]
