"""The text of an output with other tokenizers: of Llama 2 and Mistral, and of Tunix's kind."""

from __future__ import annotations

from typing import Any

import pytest

from sgljax_engine import Engine
from tests.engine import small_tokenizers
from tests.geometry import SMALL
from tests.server.served import FOLDER, events_of, serving

SPACED = small_tokenizers.byte_fallback()


@pytest.fixture(scope="module")
def served():
    with Engine(FOLDER, tokenizer=SPACED, **SMALL) as engine, serving(engine) as served:
        yield served


@pytest.fixture(scope="module")
def of_chars():
    """With a tokenizer that cannot be told to keep special tokens."""
    tokenizer = small_tokenizers.CharTokenizer()
    with Engine(FOLDER, tokenizer=tokenizer, **SMALL) as engine, serving(engine) as served:
        yield served


@pytest.mark.parametrize("stream", [False, True])
def test_the_space_between_them(served, stream):
    """The decoder strips the first space of a text."""
    ids: Any = SPACED.convert_tokens_to_ids(["a", f"{small_tokenizers.SPACE}the"])
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


def test_completions_have_the_text_of_each_token(of_chars):
    fields = {"temperature": 0, "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
    body = {"prompt": [5, 65, 66], "logprobs": 1, "echo": True, **fields}
    (choice,) = of_chars.ok("/v1/completions", body)["choices"]
    ids = [5, 65, 66, *choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == [chr(token) for token in ids]
    assert choice["text"] == "".join(choice["logprobs"]["tokens"])


def test_generate_has_the_text_of_each_token(of_chars):
    body = {"input_ids": [5, 65], "return_logprob": True, "return_text_in_logprobs": True}
    reply = of_chars.ok("/generate", {**body, "sampling_params": {"max_new_tokens": 5}})
    for _, token, text in reply["meta_info"]["output_token_logprobs"]:
        assert text == chr(token)


def test_detokenize(of_chars):
    assert of_chars.ok("/detokenize", {"tokens": [65, 2, 66]})["prompt"] == "A\x02B"
