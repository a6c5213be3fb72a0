"""Two rollout nodes behind Tunix's engine, one killed: what Tunix does, and what we add.

The nodes are processes with our gRPC server and a worker that needs no model.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.devices import ROOT, device_variables

QUICK_COMPILE = "processes and their calls, no numbers"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("grpc_tools") is None,
        reason="Tunix's workers need gRPC: pip install grpcio grpcio-tools",
    ),
]

NODES = "tunix_sgljax.experimental.nodes"
NODE = f"""
import asyncio, sys
from tunix.experimental.common import datatypes
from {NODES}.serving import NodeServer

class Worker:
    def heartbeat(self):
        return "well"
    async def generate(self, requests):
        if sys.argv[1] == "never":
            await asyncio.Event().wait()
        (request,) = requests
        return datatypes.RolloutResponse(
            request_id=request.request_id,
            prompt_id=request.prompt_id,
            metadata=request.metadata,
            status="COMPLETED",
        )

async def serve():
    server = NodeServer(Worker(), "127.0.0.1")
    await server.start_serving_async(int(sys.argv[2]))
    print("serves", flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""


class Node:
    """A rollout node: one that answers, or one that accepts requests and never ends them."""

    def __init__(self, kind: str) -> None:
        from tests.experimental.test_nodes import free_port

        self.port = free_port()
        self.process = subprocess.Popen(
            [sys.executable, "-c", NODE, kind, str(self.port)],
            cwd=ROOT,
            env=device_variables(1),
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_until_it_serves(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "serves\n"

    def close(self) -> None:
        self.process.kill()
        with self.process:  # waits for it, and closes its output
            pass


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    made = [Node("at once"), Node("never")]
    try:
        for node in made:
            node.wait_until_it_serves()
        yield made
    finally:
        for node in made:
            node.close()


def prompts_of(node: int, count: int) -> list[dict[str, Any]]:
    """Prompts that Tunix routes to a node: by the hash of the prompt's id."""
    names = (f"prompt-{i}" for i in range(1_000))
    own = [name for name in names if hash(name) % 2 == node]
    return [{"prompt": name, "prompt_id": name} for name in own[:count]]


@pytest.mark.parametrize(
    ("host", "is_safe"),
    [
        ("127.0.0.1", True),
        ("127.0.0.2", True),
        ("localhost", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("[::]", False),
        ("10.0.0.7", False),
        ("trainer-3", False),
    ],
)
def test_a_node_that_others_reach_warns(host, is_safe, caplog):
    serving = importlib.import_module(f"{NODES}.serving")
    serving.warn_if_reachable(host, 20001)
    (*records,) = caplog.records
    assert len(records) == (not is_safe)
    for record in records:
        assert f"--host={host}: whoever reaches port 20001 can run code" in record.message


def test_requests_of_a_killed_node_are_neither_answered_nor_refused_nor_sent_again(nodes):
    engines = importlib.import_module("tunix.experimental.orchestrator.distributed_rl_engine")
    remote = importlib.import_module("tunix.experimental.worker.remote_execution")
    orchestrator = importlib.import_module(f"{NODES}.orchestrator")

    async def run() -> None:
        addresses = [f"127.0.0.1:{node.port}" for node in nodes]
        handles = [remote.ActorHandle.from_address(f"grpc://{each}") for each in addresses]
        engine = engines.DistributedRLEngine(handles, trainer_workers={})
        await engine.dispatch_rollouts(prompts_of(0, 2) + prompts_of(1, 2))
        nodes[1].close()
        items = []
        for _ in range(10):  # the lost ones are no error either: Tunix asks for them for ever
            items += await engine.poll_rollouts(timeout_s=0.1)
        assert {item.group_id for item in items} == {
            prompt["prompt_id"] for prompt in prompts_of(0, 2)
        }
        # The node stays in the pool, and what belongs to it goes to no other.
        with pytest.raises(Exception, match="UNAVAILABLE"):
            await engine.dispatch_rollouts(prompts_of(1, 1))
        await engine.dispatch_rollouts(prompts_of(0, 3)[2:])
        assert len(await engine.poll_rollouts(timeout_s=5.0)) == 1

        # Our watch names the node that does not answer, and not the other.
        watch = orchestrator.WorkerWatch(1.0, on_lost=lambda: None)
        watch.add("rollout-0", addresses[0])
        assert await asyncio.to_thread(watch.ask_all) is None
        watch.add("rollout-1", addresses[1])
        lost = await asyncio.to_thread(watch.ask_all)
        assert f"worker rollout-1 at {addresses[1]} has not answered" in str(lost)

    asyncio.run(run())
