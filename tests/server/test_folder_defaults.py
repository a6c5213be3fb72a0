"""What clients that name nothing get from generation_config.json, by each road to the engine."""

from __future__ import annotations

import json
import shutil

import pytest

from sgljax_engine import Engine
from tests.geometry import SMALL
from tests.server.served import FOLDER, serving

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def first_tokens():
    """The most likely first token and, without it, the next one."""
    with Engine(FOLDER, **SMALL) as engine:
        params = {"temperature": 0, "max_new_tokens": 1}
        first = engine.generate(input_ids=PROMPT, sampling_params=params)["output_ids"]
        params["bad_token_ids"] = first
        return first + engine.generate(input_ids=PROMPT, sampling_params=params)["output_ids"]


@pytest.fixture(scope="module")
def served(tmp_path_factory, first_tokens):
    """A folder that suppresses the first, takes the likeliest of the rest, and wants 3 tokens."""
    folder = shutil.copytree(FOLDER, tmp_path_factory.mktemp("defaults") / "model")
    fields = {"suppress_tokens": first_tokens[:1], "top_k": 900, "top_p": 0, "min_new_tokens": 3}
    (folder / "generation_config.json").write_text(json.dumps({**fields, "eos_token_id": [1, 4]}))
    with Engine(folder, **SMALL) as engine, serving(engine) as served:
        yield served


def test_in_process(served, first_tokens):
    out = served.engine.generate(input_ids=PROMPT)
    assert out["output_ids"][0] == first_tokens[1]
    assert len(out["output_ids"]) >= 3


def test_openai_with_fewer_tokens_than_the_folders_minimum(served, first_tokens):
    body = {"prompt": PROMPT, "max_tokens": 1, "return_token_ids": True}
    (choice,) = served.ok("/v1/completions", body)["choices"]
    assert choice["token_ids"] == first_tokens[1:]


def test_masks_of_fewer_tokens_than_the_folders_top_k(served, first_tokens):
    body = {"prompt": PROMPT, "max_tokens": 1, "return_sampling_mask": True}
    (choice,) = served.ok("/v1/completions", body)["choices"]
    assert choice["sampling_mask"] == {"token_ids": first_tokens[1:], "offsets": [0, 1]}
    out = served.ok("/generate", {"input_ids": PROMPT, "return_sampling_mask": True})
    assert out["meta_info"]["output_token_sampling_mask"][0] == first_tokens[1:]
    body = {"input_ids": PROMPT, "return_sampling_mask": True, "sampling_params": {"top_k": 900}}
    assert "top_k must be at most 512" in served.post("/generate", body).text


def test_generate_without_parameters(served, first_tokens):
    assert served.ok("/generate", {"input_ids": PROMPT})["output_ids"][0] == first_tokens[1]


def test_parameters_of_the_caller_replace_the_folders(served, first_tokens):
    """As in vLLM and SGLang, and so a rollout's own parameters are all that it samples with."""
    params = {"temperature": 0, "max_new_tokens": 1}
    body = {"input_ids": PROMPT, "sampling_params": params}
    assert served.ok("/generate", body)["output_ids"] == first_tokens[:1]
    out = served.engine.generate(input_ids=PROMPT, sampling_params=params)
    assert out["output_ids"] == first_tokens[:1]


def test_the_longest_prompt_that_leaves_room_for_one(served):
    longest = [7] * (served.engine.max_model_len - 1)
    assert len(served.engine.generate(input_ids=longest)["output_ids"]) == 1
    assert len(served.ok("/generate", {"input_ids": longest})["output_ids"]) == 1
