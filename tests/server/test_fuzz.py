"""Whatever clients send, the server answers, and no page is lost."""

from __future__ import annotations

import collections
import contextlib
import json
import random
import socket
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sgljax_engine import Engine
from tests.engine.interrupts import assert_idle
from tests.geometry import other
from tests.server.served import FOLDER, Served, serving
from tests.threads import LIMIT_S, wait_for

QUICK_COMPILE = "that answers are those of the schema"

HEAL_EVERY = 20

# Hypothesis would shrink what depends on the server's state.
FUZZ = settings(
    phases=[Phase.generate],
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    derandomize=True,
    database=None,
)


@pytest.fixture(scope="module")
def served():
    with (
        Engine(FOLDER, **other("thousands of answers, all short", max_model_len=64)) as engine,
        serving(engine, halt_timeout_s=0.02, max_requests=64, weights_root=FOLDER) as served,
    ):
        yield served


def heal(served: Served) -> None:
    """Lets the engine serve again, whatever a client did to it."""
    engine = served.engine
    engine.continue_generation()
    engine.wake_up()
    if not engine.get_internal_state().has_weights:
        engine.update_weights(FOLDER)


def assert_whole(served: Served) -> None:
    """Nothing is left of any request."""
    heal(served)
    wait_for(lambda: served.server._context.generation.num_open == 0)
    wait_for(lambda: served.engine.get_internal_state().running_batch_size == 0)
    assert_idle(served.engine)
    assert served.get("/health_generate").status_code == 200
    served.engine.flush_cache()
    state = served.engine.get_internal_state()
    assert state.available_kv_tokens == state.total_kv_tokens


CORE = {
    "/generate": {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 9}},
    "/v1/completions": {"prompt": "the fox"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}


def tamed(path: str, body: Any, rng: random.Random) -> Any:
    """Every other body of a route that generates, with a sound prompt and few other fields.

    Else nearly all are refused, since one wrong field is enough.
    """
    if path not in CORE or not isinstance(body, dict) or rng.random() < 0.5:
        return body
    others = [name for name in body if name not in (*CORE[path], "model", "text", "lora_path")]
    kept = rng.sample(others, min(len(others), rng.randrange(3)))
    return CORE[path] | {name: body[name] for name in kept}


@pytest.mark.parametrize(
    "num_examples",
    [pytest.param(150, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.soak)],
)
def test_requests_that_the_schema_allows_and_others(served, num_examples):
    """Over all routes, on one server that stays as earlier requests left it."""
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    # Half of them of all routes, which are so many that few are of those that generate.
    core = [schema[path]["POST"].as_strategy() for path in CORE]
    cases = st.one_of(schema.as_strategy(), st.one_of(core))
    count = 0
    rng = random.Random(0)
    statuses: collections.Counter[tuple[str, int]] = collections.Counter()

    @settings(FUZZ, max_examples=num_examples)
    @given(case=cases)
    def run(case: Any) -> None:
        nonlocal count
        count += 1
        if count % HEAL_EVERY == 0:
            heal(served)
        case.body = tamed(case.path, case.body, rng)
        response = case.call(timeout=LIMIT_S)
        statuses[case.path, response.status_code] += 1
        if response.status_code == 503:  # too many, or halted: the client may try again
            assert "retry-after" in response.headers
            return
        assert response.status_code < 500, (case.as_curl_command(), response.text)
        if response.status_code != 200 and case.path != "/flush_cache":
            assert response.json()["error"]["message"]

    run()
    assert count >= num_examples
    for path in CORE:
        assert statuses[path, 200] > num_examples / 200, statuses
    assert_whole(served)


def raw(body: bytes, path: str, length: int) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    )
    return head.encode("latin-1") + body


def mutated(rng: random.Random) -> bytes:
    """A request with something wrong in it, or not."""
    path = rng.choice(["/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/x"])
    values = [None, -1, 1e400, "\ud800", [], {}, [[]], "a" * 500, 2**70, True, [1, 2], "\0"]
    names = ["text", "prompt", "input_ids", "messages", "sampling_params", "stream", "n", "stop"]
    body: Any = {rng.choice(names): rng.choice(values) for _ in range(rng.randrange(4))}
    if rng.random() < 0.4:
        body |= {"/generate": {"input_ids": [5, 6]}, "/tokenize": {"prompt": "a"}}.get(
            path, {"prompt": "a", "max_tokens": 30, "stream": rng.random() < 0.5}
        )
    content = json.dumps(body).encode()
    for _ in range(rng.choice([0, 0, 1, 3])):
        place = rng.randrange(len(content) + 1)
        content = content[:place] + rng.randbytes(rng.randrange(3)) + content[place + 1 :]
    request = raw(content, path, max(0, len(content) + rng.choice([0, 0, 0, 0, -2, 5])))
    if rng.random() < 0.1:
        request = rng.randbytes(rng.randrange(200))
    return request


@pytest.mark.parametrize(
    "num_clients",
    [pytest.param(1500, marks=pytest.mark.slow), pytest.param(15_000, marks=pytest.mark.soak)],
)
def test_raw_bodies_and_clients_that_stop(served, num_clients):
    """Random bytes, cut and mutated requests, and clients that leave at any moment."""
    rng = random.Random(0)
    open_ones: list[socket.socket] = []
    with contextlib.ExitStack() as sockets:
        for _ in range(num_clients):
            client = socket.create_connection(("127.0.0.1", served.server.port), timeout=LIMIT_S)
            sockets.callback(client.close)
            request = mutated(rng)
            action = rng.choice(["answer", "leave", "half", "stay", "reset"])
            with contextlib.suppress(ConnectionError):
                client.sendall(request[: len(request) // 2] if action == "half" else request)
                if action == "answer":
                    client.shutdown(socket.SHUT_WR)
                    assert b"HTTP/1.1 500" not in client.recv(4096)
            if action == "reset":
                linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            if action == "stay" and len(open_ones) < 100:
                open_ones.append(client)  # sends no more, reads nothing
            else:
                client.close()
        assert served.get("/health").status_code == 200
    assert_whole(served)
