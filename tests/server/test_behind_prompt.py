"""The text of an output stands behind its prompt, with the tokenizers of Llama 2 and Mistral."""

from __future__ import annotations

from typing import Any

import pytest

from sgljax_engine import Engine
from tests.engine import small_tokenizers
from tests.geometry import SMALL
from tests.server.served import FOLDER, events_of, serving


@pytest.fixture(scope="module")
def served():
    with (
        Engine(FOLDER, tokenizer=small_tokenizers.byte_fallback(), **SMALL) as engine,
        serving(engine) as served,
    ):
        yield served


@pytest.mark.parametrize("stream", [False, True])
def test_the_space_between_them(served, stream):
    """The decoder strips the first space of a text."""
    tokenizer = small_tokenizers.byte_fallback()
    ids: Any = tokenizer.convert_tokens_to_ids(["a", f"{small_tokenizers.SPACE}the"])
    a, the = ids
    fields = {"temperature": 0, "logit_bias": {str(the): 100}, "stream": stream}

    def text(path, body):
        response = served.post(path, body)
        assert response.status_code == 200, response.text
        if not stream:
            reply = response.json()
            return reply["text"] if path == "/generate" else reply["choices"][0]["text"]
        events = events_of(response)
        if path == "/generate":
            return events[-1]["text"]
        return "".join(choice["text"] for event in events for choice in event["choices"])

    body = {"prompt": [a], "max_tokens": 2, **fields}
    assert text("/v1/completions", body) == " the the"
    assert text("/v1/completions", {**body, "echo": True}) == "a the the"
    params = {"max_new_tokens": 2, "temperature": 0, "logit_bias": {str(the): 100}}
    generate = {"input_ids": [a], "sampling_params": params, "stream": stream}
    assert text("/generate", generate) == " the the"
    alone = {**params, "decode_behind_prompt": False}
    assert text("/generate", {**generate, "sampling_params": alone}) == "the the"
