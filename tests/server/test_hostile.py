"""Requests that no honest client sends: each gets an error that says little, none a status 500."""

from __future__ import annotations

import json
import logging
import os
import shutil

import pytest

from tests.server.served import FOLDER, serving
from tests.threads import LIMIT_S, start

SURROGATE = "a\ud800b"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def served(golden, root):
    with serving(golden, weights_root=root) as served:
        yield served


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/generate", {"text": SURROGATE}, "text"),
        ("/generate", {"text": ["a", SURROGATE]}, "text.1"),
        ("/generate", {"text": "a", "sampling_params": {"stop": SURROGATE}}, "params.stop"),
        ("/v1/completions", {"prompt": SURROGATE}, "prompt"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": SURROGATE}]},
            "messages.0.content",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}],
             "chat_template_kwargs": {SURROGATE: SURROGATE}},
            "chat_template_kwargs",
        ),
        ("/tokenize", {"prompt": SURROGATE}, "prompt"),
        ("/abort_request", {"rid": SURROGATE}, "rid"),
    ],
)  # fmt: skip
def test_a_lone_surrogate_is_named(served, path, body, field):
    # A client's library would refuse to send it otherwise.
    headers = {"content-type": "application/json"}
    response = served.http.post(path, content=json.dumps(body), headers=headers)
    assert response.status_code == 400, response.text
    assert f"{field} must be text without lone surrogates" in response.json()["error"]["message"]


def test_a_lone_surrogate_in_process(served):
    engine = served.engine
    for call in (
        lambda: engine.generate(SURROGATE),
        lambda: engine.tokenize(SURROGATE),
        lambda: engine.chat([{"role": "user", "content": SURROGATE}]),
    ):
        with pytest.raises(ValueError, match="must be text without lone surrogates"):
            call()


@pytest.mark.parametrize("kind", ["integer", "pipe", "missing", "truncated", "config"])
def test_bad_weights_are_a_400_without_the_servers_paths(served, root, kind, caplog):
    folder = root / kind
    shutil.copytree(FOLDER, folder)
    weights = folder / "model.safetensors"
    if kind == "integer":
        weights.unlink()  # a single file goes before an index
        index = {"weight_map": {"w": 5}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif kind == "config":
        (folder / "config.json").write_text("{")
    elif kind == "truncated":
        os.truncate(weights, 1000)
    else:
        weights.unlink()
        if kind == "pipe":
            os.mkfifo(weights)
    with caplog.at_level(logging.ERROR):
        response = served.post("/update_weights_from_disk", {"model_path": kind})
    assert response.status_code == 400, response.text
    assert not response.json()["success"]
    assert str(root) not in response.text
    assert kind in response.json()["message"]
    assert not caplog.records


def test_a_template_that_does_not_end(served, monkeypatch):
    monkeypatch.setattr("sgljax_engine.server.context.TEMPLATE_TIMEOUT_S", 0.2)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer = served.engine._tokenizer._tokenizer
    body = {"messages": [{"role": "user", "content": "hi"}]}
    template = tokenizer.chat_template
    tokenizer.chat_template = loop
    try:
        calls = [
            start(lambda path=path: served.http.post(path, json=body))
            for path in ("/v1/chat/completions", "/tokenize") * 4
        ]
        assert served.get("/health").status_code == 200
        for call in calls:
            response = call.result(LIMIT_S)
            assert response.status_code == 400
            assert "the chat template took more than 0.2 s" in response.json()["error"]["message"]
    finally:
        tokenizer.chat_template = template
    monkeypatch.undo()
    assert served.ok("/tokenize", body)["count"]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("given", ["", "application/x-www-form-urlencoded"])
def test_another_content_type_is_named(served, path, given):
    headers = {"content-type": given} if given else {}
    reply = served.http.post(path, content=b'{"text": "a"}', headers=headers)
    assert reply.status_code == 400
    told = f"got {given!r}" if given else "none was sent"
    message = f"the header Content-Type must be application/json, {told}"
    assert reply.json()["error"]["message"] == message
