"""OpenAI's routes, through the official client for node."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.server.node_packages import SOURCES, installed, node_path
from tests.server.scripted import CALL, TOOLS
from tests.threads import LIMIT_S

pytestmark = pytest.mark.slow

ASK: list[Any] = [{"role": "user", "content": "hi"}]
COMPLETION = {"model": "policy", "prompt": "the fox", "max_tokens": 12, "temperature": 0}
CHAT = {"model": "policy", "messages": ASK, "max_completion_tokens": 12, "temperature": 0}
IDS = {"return_token_ids": True, "return_weight_versions": True}


def ask(served, mode: str, **body: Any) -> Any:
    command = [
        node_path(),
        str(SOURCES / "openai_client.mjs"),
        str(installed()),
        served.url,
        mode,
    ]
    done = subprocess.run(
        command, input=json.dumps(body), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_models(scripted):
    assert [model["id"] for model in ask(scripted, "models")] == ["policy"]


def test_completions_and_their_stream(scripted):
    whole = ask(scripted, "completion", **COMPLETION, **IDS, logprobs=1)
    own = scripted.engine.generate("the fox", {"temperature": 0, "max_new_tokens": 12})
    (choice,) = whole["choices"]
    assert (choice["text"], choice["token_ids"]) == (own["text"], own["output_ids"])
    options = {"stream_options": {"include_usage": True}, "logprobs": 1}
    chunks = ask(scripted, "completionStream", **COMPLETION, **IDS, **options)
    assert chunks[-1]["usage"]["completion_tokens"] == len(own["output_ids"])
    pieces = [piece for chunk in chunks for piece in chunk["choices"]]
    assert "".join(piece["text"] for piece in pieces) == own["text"]
    assert [i for piece in pieces for i in piece["token_ids"]] == own["output_ids"]


def test_chat_and_its_stream(scripted):
    own = scripted.engine.chat(ASK, {"temperature": 0, "max_new_tokens": 12})
    (choice,) = ask(scripted, "chat", **CHAT, **IDS)["choices"]
    assert choice["message"]["content"] == own["text"]
    assert choice["message"]["token_ids"] == own["output_ids"]
    chunks = ask(scripted, "chatStream", **CHAT)
    deltas = [piece["delta"] for chunk in chunks for piece in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == own["text"]
    again = [*ASK, choice["message"], *ASK]
    turn = ask(scripted, "chat", **{**CHAT, "messages": again}, **IDS)
    before = choice["message"]["prompt_token_ids"] + own["output_ids"]
    assert turn["prompt_token_ids"][: len(before)] == before


def test_a_stream_of_calls(scripted, tokenizer):
    text = f"So:<tool_call>{CALL}</tool_call>"
    tokenizer.text = text
    try:
        body = {**CHAT, "max_completion_tokens": len(text), "ignore_eos": True, "tools": TOOLS}
        reply = ask(scripted, "chatStream", **body)
    finally:
        tokenizer.text = ""
    deltas = [piece["delta"] for chunk in reply for piece in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "So:"
    (call,) = [call for delta in deltas for call in delta.get("tool_calls") or []]
    assert call["function"] == {"name": "add", "arguments": '{"x": 1}'}


def test_errors(scripted):
    error = ask(scripted, "error", **{**COMPLETION, "max_tokens": 9999})
    assert (error["name"], error["status"]) == ("BadRequestError", 400)
    assert "max_tokens" in error["message"]
