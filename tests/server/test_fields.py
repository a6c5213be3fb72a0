"""Every field of SGLang's, vLLM's and OpenAI's bodies is honoured, neutral or refused by name."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from pydantic import ValidationError

from sgljax_engine import FOREIGN_FIELDS, SamplingParams
from sgljax_engine.server.chat import ChatRequest
from sgljax_engine.server.completions import CompletionRequest
from sgljax_engine.server.fields import FOREIGN_FIELD
from sgljax_engine.server.messages import Message, Tokenize
from sgljax_engine.server.sglang import SGLangSampling

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("maker", ROOT / "docs/make_server_fields.py")
assert _SPEC is not None
assert _SPEC.loader is not None
maker = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(maker)

MESSAGE: dict[str, Any] = {"role": "user", "content": "hi"}
LEAST: dict[type[Any], dict[str, Any]] = {
    CompletionRequest: {"prompt": "a"},
    ChatRequest: {"messages": [MESSAGE]},
    Message: MESSAGE,
    Tokenize: {"prompt": "a"},
}
"""What a body cannot be without."""

BODIES = [*maker.BODIES.values(), Message, Tokenize]

PLAIN = {
    "/generate": {"text": "the fox", "sampling_params": {"temperature": 0, "max_new_tokens": 4}},
    "/v1/completions": {"prompt": "the fox", "temperature": 0, "max_tokens": 4},
    "/v1/chat/completions": {"messages": [MESSAGE], "temperature": 0, "max_tokens": 4},
}


def test_the_page_is_up_to_date():
    text = maker.OUTPUT.read_text(encoding="utf-8")
    assert text == maker.render(text), "run python docs/make_server_fields.py"


def test_what_the_page_says_of_sampling_params():
    """The fields of `SamplingParams` and SGLang's names; else refused as the engine refuses."""
    own = {field.name for field in dataclasses.fields(SamplingParams)}
    assert SGLangSampling.model_fields.keys() == own | maker.SGLANG_NAMES.keys()
    foreign = FOREIGN_FIELDS.keys() - maker.SGLANG_NAMES.keys()
    assert SGLangSampling.foreign == {name: FOREIGN_FIELDS[name] for name in foreign}


@pytest.mark.parametrize("body", BODIES)
def test_no_field_is_honoured_and_foreign(body):
    assert not body.model_fields.keys() & body.foreign.keys()
    assert body.empty_is_null <= body.model_fields.keys()


@pytest.mark.parametrize(
    ("body", "params"), [(CompletionRequest, CompletionParams), (ChatRequest, ChatParams)]
)
def test_all_fields_of_openais_client_are_known(body, params):
    known = body.model_fields.keys() | body.foreign.keys()
    assert params.__annotations__.keys() <= known


@pytest.mark.parametrize("body", BODIES)
def test_foreign_fields(body):
    least = LEAST.get(body, {})
    plain = body.model_validate(least)
    for field in body.foreign.values():
        nothing = [None, "", [], {}, *field.neutral]
        for value in [*nothing, False] if field.takes_false else nothing:
            assert body.model_validate({**least, field.name: value}) == plain
        for value in ("x", {"a": 1}, [3], 7, *([] if field.takes_false else [False])):
            with pytest.raises(ValidationError) as caught:
                body.model_validate({**least, field.name: value})
            (error,) = caught.value.errors()
            assert (error["type"], error.get("ctx", {})["name"]) == (FOREIGN_FIELD, field.name)


@pytest.mark.parametrize("body", BODIES)
def test_null_is_no_value(body):
    least = LEAST.get(body, {})
    optional = [name for name in body.model_fields if name not in least]
    assert body.model_validate({**dict.fromkeys(optional), **least}) == body.model_validate(least)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/generate", {"image_data": None, "stream": None, "return_logprob": None}),
        ("/generate", {"image_data": [], "lora_path": "", "rid": None, "return_bytes": False}),
        ("/generate", {"sampling_params": {"temperature": 0, "max_new_tokens": 4, "regex": None,
                                           "stop": "", "use_beam_search": False, "best_of": 1}}),
        ("/v1/completions", {"suffix": None, "best_of": 1, "use_beam_search": False, "stop": "",
                             "echo": None, "guided_json": {}, "top_k": 0}),
        ("/v1/chat/completions", {"service_tier": None, "add_generation_prompt": None,
                                  "functions": [], "response_format": None, "top_k": 0,
                                  "logprobs": None, "stream_options": None, "modalities": ["text"],
                                  "model": ""}),
        ("/v1/chat/completions", {"messages": [{**MESSAGE, "tool_calls": [], "refusal": None,
                                                "reasoning": "", "annotations": []}]}),
    ],
)  # fmt: skip
def test_what_asks_for_nothing_changes_nothing(served, path, fields):
    def texts(body: dict[str, Any]) -> list[Any]:
        reply = served.ok(path, body)
        choices = reply.get("choices", [reply])
        return [each.get("text", each.get("message")) for each in choices]

    assert texts({**PLAIN[path], **fields}) == texts(PLAIN[path])


class TestTokenNames:
    def test_by_their_ids(self, served):
        body = {**PLAIN["/v1/completions"], "logprobs": 5, "return_token_ids": True}
        plain = served.ok("/v1/completions", body)["choices"][0]
        named = served.ok("/v1/completions", {**body, "return_tokens_as_token_ids": True})
        found = named["choices"][0]["logprobs"]
        assert found["tokens"] == [f"token_id:{token}" for token in plain["token_ids"]]
        for top, own in zip(found["top_logprobs"], plain["logprobs"]["top_logprobs"], strict=True):
            assert all(name.startswith("token_id:") for name in top)
            assert sorted(top.values()) == sorted(own.values())

    def test_in_chat(self, served):
        body = {**PLAIN["/v1/chat/completions"], "logprobs": True, "top_logprobs": 2}
        body |= {"return_tokens_as_token_ids": True, "return_token_ids": True}
        (choice,) = served.ok("/v1/chat/completions", body)["choices"]
        names = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert names == [f"token_id:{token}" for token in choice["token_ids"]]

    @pytest.mark.soak
    def test_equal_texts_are_all_there(self, served):
        """Tokens that are parts of characters have one text; most of this vocabulary are."""
        engine = served.engine
        parts = [t for t in range(320) if engine.detokenize([t]) == "\ufffd"][:40]
        body = {**PLAIN["/v1/completions"], "logprobs": 20, "echo": True, "prompt": parts[:9],
                "allowed_token_ids": parts, "return_token_ids": True}  # fmt: skip
        (choice,) = served.ok("/v1/completions", body)["choices"]
        logprobs, ids = choice["logprobs"], parts[:9] + choice["token_ids"]
        own = engine.generate(
            input_ids=ids, sampling_params={"max_new_tokens": 1}, return_logprob=True,
            logprob_start_len=0, top_logprobs_num=20)  # fmt: skip
        tops = own["meta_info"]["input_top_logprobs"]
        for entries, found in zip(tops[1:], logprobs["top_logprobs"][1:], strict=True):
            assert len(found) == 20
            assert sorted(found.values()) == pytest.approx(sorted(e[0] for e in entries), abs=1e-4)
            likeliest = max((e for e in entries), key=lambda e: e[0])
            assert found[engine.detokenize([likeliest[1]])] == pytest.approx(likeliest[0], abs=1e-4)


class TestRoutesOfThePage:
    def test_every_route_is_in_a_table(self, served):
        section = maker.OUTPUT.read_text(encoding="utf-8").split("\n## Routes\n")[1]
        tables = section.split("\n## ")[0].split("\n| not here |")
        here, missing = (
            {
                route
                for line in table.splitlines()
                if line.startswith("| `/")
                for route in re.findall(r"/[a-z0-9_/{}]+", line.split("|")[1])
            }
            for table in tables
        )
        routes = set(served.get("/openapi.json").json()["paths"])
        assert here == routes
        assert missing
        assert not missing & routes
