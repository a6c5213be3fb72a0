"""The sides of a comparison with llama.cpp: processes, each stopped while another one runs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.llamacpp_peer import Clock, Settings
from benchmarks.lib.reporting import ROOT
from sgljax_engine import Engine, ModelConfig, SamplingParams
from sgljax_engine.builder.sources import dummy_weights
from sgljax_engine.weights.rules import WeightSource
from tunix_sgljax.bench.shapes import MODELS
from tunix_sgljax.bench.workloads import Workload

LOAD_LIMIT = 0.1
"""Fraction of the machine that other processes may keep busy during a pair."""
OUR_OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
}

_PEER_SCRIPT = ROOT / "benchmarks/lib/llamacpp_peer.py"
_SEED = 0
_SETTLE_S = 0.2
_WAIT_VARIABLE = "OMP_WAIT_POLICY"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One run of one side.

    Attributes:
        wall_s: Seconds of the call.
        cpu_s: CPU seconds of its process meanwhile.
        other_load: Fraction of the machine that other processes kept busy; None if unknown.
    """

    wall_s: float
    cpu_s: float
    other_load: float | None


class Worker:
    """A process that answers commands (`serve`); it is stopped between them."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        """Starts the process.

        Args:
            command: What it runs.
            variables: Additional environment variables.
        """
        environment = {k: v for k, v in os.environ.items() if k != _WAIT_VARIABLE}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | dict(variables or {}),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._commands, self._answers = self._process.stdin, self._process.stdout

    def close(self) -> None:
        """Ends the process."""
        self._process.send_signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._commands.close()
        self._process.wait()
        self._answers.close()

    def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Sends a command and returns the answer.

        Raises:
            RuntimeError: the worker failed; the message is its own.
        """
        self._process.send_signal(signal.SIGCONT)
        time.sleep(_SETTLE_S)
        print(json.dumps({"command": command, **arguments}), file=self._commands, flush=True)
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"a worker ended with {self._process.wait()} at {command}")
        self._process.send_signal(signal.SIGSTOP)
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"a worker failed at {command}: {answer['error']}")
        return answer

    def generate(self, requests: Sequence[Sequence[int]], lengths: Sequence[int]) -> Any:
        """Answers requests; returns the run and the tokens of each."""
        answer = self.call("run", prompts=requests, lengths=lengths)
        outputs = answer.pop("outputs")
        if tuple(map(len, outputs)) != tuple(lengths):
            raise AssertionError(f"answered {[*map(len, outputs)]} tokens, not {lengths}")
        return Run(**answer), outputs

    def run(self, workload: Workload) -> Run:
        """Answers a workload."""
        return self.generate(workload.requests, workload.output_lengths)[0]


class OurSide:
    """The commands of our engine's process."""

    def __init__(self, model: str, dtype: str) -> None:
        """Makes the weights."""
        self._config, self._dtype = MODELS[model].config, dtype
        self._source = make_weights(self._config)
        self._engine: Engine | None = None

    def open(self, max_model_len: int, num_rows: int) -> dict[str, Any]:
        """Makes an engine in place of the last one and compiles it."""
        if self._engine is not None:
            self._engine.shutdown()
        self._engine = Engine(
            model_config=self._config,
            weights=self._source.arrays,
            weight_rules=self._source.rules,
            max_model_len=max_model_len,
            max_running_requests=num_rows,
            **OUR_OPTIONS[self._dtype],
        )
        self._engine.warmup()
        return {}

    def run(self, prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
        """Answers requests greedily, from an empty prefix cache."""
        assert self._engine is not None
        params = [
            SamplingParams(temperature=0.0, max_new_tokens=length, ignore_eos=True)
            for length in lengths
        ]
        self._engine.flush_cache()
        clock = Clock()
        outputs = self._engine.generate_requests(prompts, params)
        return clock.read() | {"outputs": [output.output_ids for output in outputs]}


def is_disturbed(other_load: float | None) -> bool:
    """Whether other processes kept too much of the machine busy."""
    return other_load is not None and other_load > LOAD_LIMIT


def make_weights(config: ModelConfig) -> WeightSource:
    """Random weights of a seed; projections keep the size of what they multiply.

    With the smaller ones of `load_format="dummy"` a greedy answer repeats one token.
    """
    source = dummy_weights(config, _SEED)
    arrays = {
        name: array * np.float32(array.shape[0] ** -0.5 / array.std())
        if name.endswith("_proj.weight")
        else array
        for name, array in source.arrays.items()
    }
    return WeightSource(arrays, source.rules)


class PeerProcesses:
    """Processes of llama.cpp, one for each waiting mode, which a process cannot change."""

    def __init__(self, python: str, path: Path, stack: contextlib.ExitStack) -> None:
        """Starts none yet; the stack ends them."""
        self._command, self._stack = [python, str(_PEER_SCRIPT), str(path)], stack
        self._workers: dict[str, Worker] = {}

    def get(self, waiting: str) -> Worker:
        """The process of a waiting mode."""
        if waiting not in self._workers:
            variables = {} if waiting == "default" else {_WAIT_VARIABLE: waiting}
            self._workers[waiting] = Worker(self._command, variables)
            self._stack.callback(self._workers[waiting].close)
        return self._workers[waiting]

    def open(self, workload: Workload, settings: Settings) -> Worker:
        """The process of the settings' waiting mode, ready for a workload."""
        worker = self.get(settings.waiting)
        options = dataclasses.asdict(settings)
        worker.call("open", max_model_len=workload.max_model_len, settings=options)
        return worker
