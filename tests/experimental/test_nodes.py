"""Tunix's own launcher and orchestrator over our nodes, each a process of its own.

They need gRPC, which Tunix does not require: `pip install grpcio grpcio-tools`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import importlib.util
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import tunix
from safetensors.numpy import load_file

from addition_task import new_model, save_checkpoint
from hf_folder import write_hf_folder
from tests.cli.tunix_offline import tiny_config
from tests.devices import ROOT, device_variables
from tests.recipes.models import VOCAB_SIZE, write_tokenizer
from tests.threads import LIMIT_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("grpc_tools") is None,
        reason="Tunix's workers need gRPC: pip install grpcio grpcio-tools",
    ),
]

STEPS, PROMPTS, GENERATIONS = 3, 2, 2
LENGTHS = ("--max_prompt_length=640", "--max_response_length=12")
NODES = "tunix_sgljax.experimental.nodes"
PROTO = Path("tunix/experimental/distributed/runtime/discovery/discovery_service.proto")


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """What Tunix's checkout lacks and says how to make: the modules of its discovery service."""
    root = Path(tunix.__file__).parents[1]
    out = tmp_path_factory.mktemp("generated")
    outputs = [f"--python_out={out}", f"--grpc_python_out={out}"]
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{root}", *outputs, str(root / PROTO)]
    subprocess.run(protoc, check=True)
    return out / PROTO.parent


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A small Qwen3 whose tokenizer has a token for each character, as GSM8K's texts need."""
    folder = tmp_path_factory.mktemp("qwen3")
    config = dataclasses.replace(tiny_config(), vocab_size=VOCAB_SIZE)
    checkpoint = folder / "checkpoint.safetensors"
    save_checkpoint(checkpoint, new_model(0, config), {})
    made = write_hf_folder(folder / "model", checkpoint, config)
    return write_tokenizer(made, names_pad=True)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


class Run:
    """A trainer, a rollout node, and Tunix's orchestrator of GSM8K; killed when the stack ends."""

    def __init__(
        self, stack: ExitStack, folder: Path, generated: Path, model: Path, num_steps: int
    ) -> None:
        self._stack, self._folder, self._generated = stack, folder, generated
        self._discovery_port = free_port()
        self.rollout_port = free_port()
        self.weights = folder / "weights"
        common = (f"--model_dir={model}", "--model_id=tiny", *LENGTHS)
        self.trainer = self._start(
            "trainer",
            f"--port={free_port()}",
            *common,
            f"--weight_folder={self.weights}",
            "--learning_rate=0.01",
            f"--mini_batch_size={PROMPTS * GENERATIONS}",
        )
        options = '{"num_kv_tokens": 8192, "max_running_requests": 4}'
        self.rollout = self._start(
            "rollout", f"--port={self.rollout_port}", *common, f"--engine_options={options}"
        )
        self.orchestrator = self._start(
            "orchestrator",
            "--worker_timeout_s=3",
            f"--tokenizer_path={model}",
            *LENGTHS,
            f"--batch_size={PROMPTS}",
            f"--num_generations={GENERATIONS}",
            f"--max_steps={num_steps}",
        )

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        port = self._discovery_port
        where = [f"--discovery_addrs=orchestrator:{port}"]
        output = self._stack.enter_context((self._folder / f"{name}.log").open("w"))
        if name == "orchestrator":
            where, output = ["--discovery_id=orchestrator", f"--discovery_port={port}"], None
        process = subprocess.Popen(
            [
                *(sys.executable, str(Path(__file__).with_name("launch.py"))),
                *(str(self._generated), f"--process_main={NODES}.{name}.main", *where),
                *arguments,
            ],
            cwd=ROOT,
            env={**device_variables(1), "WEIGHT_SYNC_BACKEND": "noop"},
            stdout=output if output is not None else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def follow(self, on_line: Callable[[str], None] = lambda line: None) -> str:
        """What the orchestrator writes until it has ended, line by line."""
        assert self.orchestrator.stdout is not None
        limit = threading.Timer(3 * LIMIT_S, self.orchestrator.kill)
        limit.start()
        lines = []
        with self.orchestrator.stdout as output:
            for line in output:
                lines.append(line)
                on_line(line)
        limit.cancel()
        return "".join(lines)


class Doubler:
    """A worker with one method."""

    def double(self, value: int) -> int:
        return 2 * value


def test_a_node_listens_on_one_address():
    """Not on others of the machine, 127.0.0.2 for one."""
    serving = importlib.import_module(f"{NODES}.serving")
    remote = importlib.import_module("tunix.experimental.worker.remote_execution")
    assert serving.make_parser("", port=1, worker_id="").get_default("host") == "127.0.0.1"
    port = free_port()

    async def call() -> int:
        server = serving.NodeServer(Doubler(), "127.0.0.1")
        await server.start_serving_async(port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port))
        handle = remote.ActorHandle.from_address(f"grpc://127.0.0.1:{port}")
        try:
            return await handle.asubmit("double", 21)
        finally:
            await server.stop_serving(0)

    assert asyncio.run(call()) == 42


def test_three_steps(tmp_path, generated, model_folder):
    from tunix.experimental.worker.remote_execution import (  # pyright: ignore
        ActorHandle,
    )

    with ExitStack() as stack:
        run = Run(stack, tmp_path, generated, model_folder, STEPS)
        said = run.follow()
        assert run.orchestrator.wait() == 0, said
        for version in range(1, STEPS + 1):
            assert f"Async GRPO advanced to policy_version={version} " in said
        worker = ActorHandle.from_address(f"grpc://localhost:{run.rollout_port}")
        assert worker.submit("info").resources["policy_version"] == STEPS
        (file,) = run.weights.iterdir()
        assert worker.submit("find_differing_weights", str(file)) == []
    before = load_file(model_folder / "model.safetensors")["model.embed_tokens.weight"]
    assert np.abs(load_file(file)["embedder.input_embedding"] - before).max() > 0.01


def test_a_lost_worker_ends_the_run(tmp_path, generated, model_folder):
    """Tunix's orchestrator alone waits for its episodes for ever."""
    with ExitStack() as stack:
        run = Run(stack, tmp_path, generated, model_folder, 10_000)

        def kill_in_step_2(line: str) -> None:
            if "policy_version=2 " in line:
                run.rollout.kill()

        said = run.follow(kill_in_step_2)
        assert run.orchestrator.wait() == 1
        assert "WorkerLostError: worker sgljax-rollout-0 at localhost:" in said
        assert "start it and the run again" in said
        assert run.trainer.poll() is None
