"""A policy with a tokenizer of Tunix's kind, which cannot be told to keep special tokens."""

from __future__ import annotations

import pytest

from sgljax_engine import Engine
from tests.engine.small_tokenizers import CharTokenizer
from tests.geometry import SMALL
from tests.server.served import FOLDER, serving


@pytest.fixture(scope="module")
def served():
    with Engine(FOLDER, tokenizer=CharTokenizer(), **SMALL) as engine, serving(engine) as served:
        yield served


def test_completions_have_the_text_of_each_token(served):
    fields = {"temperature": 0, "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
    body = {"prompt": [5, 65, 66], "logprobs": 1, "echo": True, **fields}
    (choice,) = served.ok("/v1/completions", body)["choices"]
    ids = [5, 65, 66, *choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == [chr(token) for token in ids]
    assert choice["text"] == "".join(choice["logprobs"]["tokens"])


def test_generate_has_the_text_of_each_token(served):
    body = {"input_ids": [5, 65], "return_logprob": True, "return_text_in_logprobs": True}
    reply = served.ok("/generate", {**body, "sampling_params": {"max_new_tokens": 5}})
    for _, token, text in reply["meta_info"]["output_token_logprobs"]:
        assert text == chr(token)


def test_detokenize(served):
    assert served.ok("/detokenize", {"tokens": [65, 2, 66]})["prompt"] == "A\x02B"
