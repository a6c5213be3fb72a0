"""Requests that hold too much are refused by counts; docs/server.md has the table of limits."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from sgljax_engine import MAX_TOP_LOGPROBS
from sgljax_engine.processing.bounded_text import MAX_CHARS_PER_TOKEN
from sgljax_engine.processing.conversation import MAX_TURNS
from sgljax_engine.sampling_params import MAX_STOP_STRING_LEN, MAX_STOP_STRINGS
from sgljax_engine.server import ServerConfig, connections
from sgljax_engine.server import body as body_module
from sgljax_engine.server.body import (
    MAX_FIELDS,
    MAX_MESSAGES,
    MAX_TOOLS,
    TOKENIZE_FACTOR,
    BodyLimits,
    read_body,
)
from sgljax_engine.server.context import TEMPLATE_TIMEOUT_S, TooSlowError, Workers
from sgljax_engine.server.responses import HTTPError
from tests.server.served import serving
from tests.threads import LIMIT_S

ANY = TypeAdapter(object)
WIDE = dict.fromkeys(BodyLimits.__dataclass_fields__, 10**9)
PIECES = [
    '"',
    "\\",
    "\\\\",
    '\\"',
    "[",
    "]",
    "{",
    "}",
    ":",
    ",",
    "a",
    "\u00e9",
    "\U0001f600",
    "\ud800",
]


@pytest.fixture(scope="module")
def served(golden):
    with serving(golden, max_requests=8) as served:
        yield served


def made(rng: random.Random, depth: int = 0):
    """Any JSON value, with strings full of JSON's own signs."""
    kind = rng.randrange(6 if depth < 4 else 4)
    if kind < 2:
        return "".join(rng.choices(PIECES, k=rng.randrange(6)))
    if kind < 4:
        return rng.choice([1, -2.5, True, None])
    if kind == 4:
        return [made(rng, depth + 1) for _ in range(rng.randrange(5))]
    return {f"{i}{rng.choice(PIECES)}": made(rng, depth + 1) for i in range(rng.randrange(5))}


def counts(value) -> dict[str, int]:
    """Containers, members and strings of a value."""
    found = {"containers": 0, "members": 0, "strings": 0}
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            found["strings"] += 1
        elif isinstance(each, (dict, list)):
            found["containers"] += 1
            if isinstance(each, dict):
                found["members"] += len(each)
                found["strings"] += len(each)
                each = each.values()
            left += each
    return found


@pytest.mark.parametrize("slice_bytes", [1, 2, 3, 7, 1 << 18])
def test_counts_are_those_of_the_parsed_value(monkeypatch, slice_bytes):
    monkeypatch.setattr(body_module, "_SLICE_BYTES", slice_bytes)
    rng = random.Random(slice_bytes)
    for _ in range(300):
        value = made(rng)
        body = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "replace")
        for name, count in counts(json.loads(body)).items():
            limits = {**WIDE, f"max_{name}": count}
            body_module._check_counts(body, BodyLimits(**limits))
            if count:
                limits[f"max_{name}"] = count - 1
                with pytest.raises(HTTPError, match=f"more than {count - 1} "):
                    body_module._check_counts(body, BodyLimits(**limits))


@pytest.mark.parametrize("slice_bytes", [1, 2, 5, 1 << 18])
def test_lists_and_strings_that_go_on_in_another_slice(monkeypatch, slice_bytes):
    monkeypatch.setattr(body_module, "_SLICE_BYTES", slice_bytes)
    body = json.dumps([[1] * 7, ['ab\\"]', "c" * 9], "\u6f22", {"x": [2] * 8}, 3]).encode()
    for name, count in {"max_entries": 8, "max_literal_bytes": 9}.items():
        body_module._check_counts(body, BodyLimits(**{**WIDE, name: count}))
        with pytest.raises(HTTPError, match=f"more than {count - 1} "):
            body_module._check_counts(body, BodyLimits(**{**WIDE, name: count - 1}))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\xff", "the body is not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "the body is not UTF-8"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b"1" * 10_000, "the body is not JSON"),
        (b"[" * 100_000, "the body is not JSON"),
        (b'{"a": {"b": ["x", "\\ud800"]}}', "a.b.1 must be text without lone surrogates"),
        (b"[]", "the body must be a JSON object, got a list"),
        (b"1.5", "the body must be a JSON object, got a number"),
        (b'{"\\udfff": 1}', "the body must be text without lone surrogates"),
    ],
)
def test_what_is_no_json(body, message):
    with pytest.raises(HTTPError, match=message) as caught:
        read_body(body, ANY, BodyLimits(**WIDE))
    assert caught.value.status == 400


def test_many_wrong_fields_are_counted_only():
    kind = TypeAdapter(dict[str, int])
    body = json.dumps({str(i): "x" for i in range(1001)}).encode()
    with pytest.raises(HTTPError, match="the body has 1001 fields that are unknown or wrong"):
        read_body(body, kind, BodyLimits(**WIDE))


def chat(count=1, **fields):
    return {"messages": [{"role": "user", "content": "hi"}] * count, **fields}


TOOL = {"type": "function", "function": {"name": "f"}}


class TestEachLimit:
    """The rows of the table, one below and one above each limit."""

    @pytest.mark.parametrize(
        ("path", "make", "limit", "message"),
        [
            ("/v1/chat/completions", chat, MAX_MESSAGES, "messages must have at most"),
            ("/tokenize", chat, MAX_MESSAGES, "messages must have at most"),
            ("/tokenize", lambda n: chat(tools=[TOOL] * n), MAX_TOOLS, "tools must have at most"),
            ("/generate", lambda n: {"input_ids": [[5]] * n}, 8, "input_ids must have at most"),
            ("/generate", lambda n: {"text": ["a"] * n}, 8, "text must have at most"),
            ("/v1/completions", lambda n: {"prompt": ["a"] * n}, 8, "prompt must have at most"),
            ("/tokenize", lambda n: {f"x{i}": 1 for i in range(n)}, MAX_FIELDS,
             "the body must have at most"),
            ("/detokenize", lambda n: {"tokens": [5] * n}, TOKENIZE_FACTOR * 512,
             "tokens must be at most"),
        ],
    )  # fmt: skip
    def test_lists_and_fields(self, served, path, make, limit, message):
        above = served.post(path, make(limit + 1))
        assert above.status_code == 400
        assert message in above.json()["error"]["message"]
        assert f"{limit}" in above.json()["error"]["message"]
        at = served.post(path, make(limit))
        assert at.status_code == 200 or message not in at.json()["error"]["message"]

    @pytest.mark.parametrize(
        ("body", "what"),
        [
            ("[" * 70_000, "objects and lists"),
            ("[" + ",".join(["{" + '"a":1,' * 1000 + '"b":1}'] * 140) + "]", "fields"),
            ("[" + ",".join(["[" + '"",' * 4000 + '""]'] * 100) + "]", "strings"),
            ('{"x":[' + "1," * 5000 + "1]}", "more than 4096 entries in a list or object"),
            ('{"x":"' + "a" * 7_000_000 + '"}', "more than 6291456 bytes in a string"),
        ],
    )
    def test_counts(self, served, body, what):
        headers = {"content-type": "application/json"}
        response = served.http.post("/generate", content=body, headers=headers)
        assert response.status_code == 400
        assert what in response.json()["error"]["message"]

    @pytest.mark.parametrize("text", ["hello world ", "\u6f22"])
    @pytest.mark.parametrize(
        ("path", "name"),
        [("/generate", "text"), ("/v1/completions", "prompt"), ("/tokenize", "prompt"),
         ("/v1/chat/completions", "messages"), ("/tokenize", "messages")],
    )  # fmt: skip
    def test_texts(self, served, path, name, text):
        given = text * (1_000_000 // len(text))
        body = {name: [{"role": "user", "content": given}] if name == "messages" else given}
        response = served.post(path, body)
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert "the text has" in message
        assert "the limit is" in message

    def test_a_text_that_just_fits(self, served):
        longest = served.engine.max_model_len - 8
        fits = served.ok("/generate", {
            "text": "a" * longest, "sampling_params": {"max_new_tokens": 1, "temperature": 0}
        })  # fmt: skip
        assert fits["meta_info"]["prompt_tokens"] <= longest + 2
        counted = served.ok("/tokenize", {"prompt": "a" * 1500})
        assert counted["count"] >= 1500 > counted["max_model_len"]

    def test_messages_quote_little(self, served):
        for body in (
            {"text": "a", "sampling_params": {"stop": [["x" * 100_000]]}},
            {"text": "a", "x" * 100_000: 1},
            {"input_ids": [-1] * 5000},
            {"text": "a", "lora_path": "x" * 100_000},
        ):
            response = served.post("/generate", body)
            assert response.status_code == 400
            assert len(response.content) < 5000


class TestWorkers:
    def test_endless_work_is_interrupted_and_its_thread_goes_on(self):
        seen = []

        def endless():
            seen.append(threading.current_thread())
            while True:
                try:
                    while True:
                        pass
                except Exception:  # as renderers of templates have it
                    continue

        async def run():
            workers = Workers()
            for _ in range(8):  # more than there are threads
                with pytest.raises(TooSlowError):
                    await workers.run(endless, 0.01)
            return await workers.run(threading.current_thread)

        assert asyncio.run(run()) is not threading.main_thread()
        assert seen
        for thread in seen:  # none goes on behind its interrupt
            thread.join(LIMIT_S)
            assert not thread.is_alive()

    def test_threads_end_with_the_event_loop(self):
        async def run():
            return await Workers().run(threading.current_thread)

        thread = asyncio.run(run())
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_the_table_in_the_docs(served):
    """Its numbers, in order of its rows; `max_requests` and the like stand for themselves."""
    page = (Path(__file__).parents[2] / "docs/server.md").read_text()
    section = page.split("\n## Limits\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| ")][1:]
    found = {
        name.strip(): [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", value)]
        for name, value in rows
    }
    config = ServerConfig()
    limits = BodyLimits.for_server(served.engine, config)
    h11_bytes = served.server._uvicorn.config.h11_max_incomplete_event_size
    count = config.max_requests
    expected = {
        "body, bytes (`max_body_bytes`)": [config.max_body_bytes],
        "samples unfinished at a time (`max_requests`)": [count],
        "prompts of a request": [],
        "tokens of a prompt and its output": [],
        "characters of a text, for each token of `max_model_len`": [MAX_CHARS_PER_TOKEN],
        "tokens for `/tokenize` and `/detokenize`, times `max_model_len`": [TOKENIZE_FACTOR],
        "messages": [MAX_MESSAGES],
        "messages with `token_ids`": [MAX_TURNS],
        "tools": [MAX_TOOLS],
        "fields of one JSON object": [MAX_FIELDS],
        "entries of one JSON list": [limits.max_entries, TOKENIZE_FACTOR],
        "objects and lists of a body": [limits.max_containers, limits.max_containers // count],
        "fields of all objects of a body": [limits.max_members, limits.max_members // count],
        "strings of a body": [limits.max_strings, limits.max_strings // count],
        "stop strings": [MAX_STOP_STRINGS, MAX_STOP_STRING_LEN],
        "`top_logprobs` and `logprobs`": [MAX_TOP_LOGPROBS],
        "headers of a request, bytes": [h11_bytes],
        "connections (`max_connections`)": [8192],
        "seconds for the headers, and again for the body (`body_timeout_s`)": [
            config.body_timeout_s
        ],
        "seconds for a chat template": [TEMPLATE_TIMEOUT_S],
        "seconds paused or asleep (`halt_timeout_s`)": [config.halt_timeout_s],
        "seconds in which a client takes some of its answer": [connections._STALLED_S],
        "seconds that an idle connection stays open": [connections._KEEP_ALIVE_S],
        "seconds for open requests when the server ends (`drain_timeout_s`)": [
            config.drain_timeout_s
        ],
    }
    assert found == expected
