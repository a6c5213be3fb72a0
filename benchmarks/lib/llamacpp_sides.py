"""The sides of a comparison with llama.cpp: processes, each stopped while another one runs."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.lib.shapes import MODELS
from sgljax_engine import Engine, ModelConfig, SamplingParams
from sgljax_engine.builder.sources import dummy_weights
from sgljax_engine.weights.rules import WeightSource

OUR_OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
}

_SEED = 0
_SETTLE_S = 0.2


class Worker:
    """A process that answers commands (`serve`); it is stopped between them."""

    def __init__(self, command: Sequence[str]) -> None:
        """Starts the process.

        Args:
            command: What it runs.
        """
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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

    def run(self, requests: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[int]]:
        """Answers requests; returns the tokens of each."""
        outputs = self.call("run", prompts=requests, lengths=lengths)["outputs"]
        if tuple(map(len, outputs)) != tuple(lengths):
            raise AssertionError(f"answered {[*map(len, outputs)]} tokens, not {lengths}")
        return outputs


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
        outputs = self._engine.generate_requests(prompts, params)
        return {"outputs": [output.output_ids for output in outputs]}


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
