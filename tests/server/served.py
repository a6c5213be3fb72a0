"""What tests of the server share: an engine behind HTTP, and a client."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import httpx

from sgljax_engine import Engine
from sgljax_engine.server import Server, ServerConfig
from tests import inside
from tests.engine.interrupts import NUM_TOKENS, wait_until
from tests.engine.small_tokenizers import GOLDEN
from tests.geometry import SMALL
from tests.threads import LIMIT_S, gate_steps, held, running, start, wait_for

FOLDER = GOLDEN / "qwen3_gqa_tied"
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}


class Served:
    """An engine, its server, and a client of it."""

    def __init__(self, engine: Engine, **options: Any) -> None:
        self.engine = engine
        self.server = Server(engine, ServerConfig(**{"port": 0, **options}))
        self.url = self.server.url
        self.http = httpx.Client(base_url=self.url, timeout=LIMIT_S)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """A request of the main thread that a gated engine answers, steps included."""
        with running():
            return self.http.post(path, json=body, **options)

    def ok(self, path: str, body: Any = None, **options: Any) -> Any:
        """The JSON of a reply that must have status 200."""
        response = self.post(path, body, **options)
        assert response.status_code == 200, response.text
        return response.json()

    def control(self, path: str, body: Any = None) -> Any:
        """As `ok`, while a gated engine takes no steps."""
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json() if response.content else None

    def state(self) -> dict[str, Any]:
        return self.get("/get_server_info").json()["internal_states"][0]

    def generate(self, prompts: Sequence[Sequence[int]], **params: Any) -> list[dict[str, Any]]:
        body = {"input_ids": list(prompts), "sampling_params": {**GREEDY, **params}}
        return self.ok("/generate", body)

    def close(self) -> None:
        self.http.close()
        self.server.stop()


@contextlib.contextmanager
def serving(engine: Engine, **options: Any) -> Iterator[Served]:
    """A server for the block."""
    served = Served(engine, **options)
    try:
        yield served
    finally:
        served.close()


@contextlib.contextmanager
def served_golden(**options: Any) -> Iterator[Served]:
    """The golden model, with its tokenizer and template, behind HTTP."""
    with Engine(FOLDER, **SMALL) as engine, serving(engine, **options) as served:
        yield served


def start_generating(
    served: Served, prompts: Sequence[Sequence[int]], **fields: Any
) -> list[Future[dict[str, Any]]]:
    """One client a prompt; returns when all requests have started and have tokens.

    As `interrupts.start_all`; the engine's steps are gated from now on.
    """
    engine = served.engine
    before = gate_steps(engine).get_internal_state().counters

    def call(ids: Sequence[int]) -> dict[str, Any]:
        with httpx.Client(timeout=LIMIT_S) as http:
            body = {"input_ids": ids, "sampling_params": GREEDY, **fields}
            response = http.post(f"{served.url}/generate", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    with held(engine):
        calls = [start(lambda ids=ids: call(list(ids))) for ids in prompts]
        wait_for(lambda: inside.tasks(engine).qsize() >= len(prompts))
    num = before.num_first_tokens + len(prompts)
    wait_until(engine, lambda state: state.counters.num_first_tokens >= num)
    return calls


def results(calls: Sequence[Future[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The replies of all clients."""
    return [call.result(LIMIT_S) for call in calls]


def tokens_of(replies: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Output ids of each."""
    return [each["output_ids"] for each in replies]


def events_of(response: httpx.Response) -> list[Any]:
    """The JSON of every server-sent event; the last must be the end mark."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines), response.text
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
