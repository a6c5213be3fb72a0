"""Conversations: `chat` is `generate` for what the tokenizer's template writes."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer
from tunix.generate.tokenizer_adapter import TokenizerAdapter

from sgljax_engine import Engine, InvalidRequestError
from tests.engine.small_tokenizers import GOLDEN
from tests.geometry import SMALL

FOLDER = GOLDEN / "qwen3_gqa_tied"
PARAMS = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
ASK = [{"role": "user", "content": "hi"}]
TALK = [
    {"role": "system", "content": "be \u00e9xact"},
    *ASK,
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "why?"},
]


def written(messages, tail="<|im_start|>assistant\n"):
    """What the golden model's template writes."""
    parts = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    return "".join(parts) + tail


def golden_tokenizer(template=None):
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def engine():
    with Engine(FOLDER, **SMALL) as engine:
        yield engine


@pytest.fixture(scope="module")
def tunix_engine():
    adapter = TokenizerAdapter(golden_tokenizer())
    with Engine(FOLDER, tokenizer=adapter, **SMALL) as engine:
        yield engine


def ids_of(text):
    return golden_tokenizer().encode(text, add_special_tokens=False)


class TestTemplate:
    @pytest.mark.parametrize("messages", [ASK, TALK])
    def test_ids(self, engine, messages):
        ids = engine.apply_chat_template(messages)
        assert ids == ids_of(written(messages))
        assert all(type(token) is int for token in ids)
        closed = engine.apply_chat_template(messages, add_generation_prompt=False)
        assert closed == ids_of(written(messages, tail=""))


def answer(output):
    return output["text"], output["output_ids"], output["meta_info"]["prompt_tokens"]


@pytest.mark.parametrize("name", ["engine", "tunix_engine"])
class TestChat:
    @pytest.fixture
    def engine_of(self, request, name):
        return request.getfixturevalue(name)

    def test_one_conversation(self, engine_of):
        output = engine_of.chat(TALK, PARAMS)
        ids = engine_of.apply_chat_template(TALK)
        assert answer(output) == answer(engine_of.generate(None, PARAMS, ids))
        assert output["text"]
        closed = engine_of.chat(TALK, PARAMS, add_generation_prompt=False)
        shorter = engine_of.apply_chat_template(TALK, add_generation_prompt=False)
        assert closed["meta_info"]["prompt_tokens"] == len(shorter) < len(ids)

    def test_several(self, engine_of):
        alone = [answer(engine_of.chat(talk, PARAMS)) for talk in (ASK, TALK)]
        assert alone[0] != alone[1]
        assert [answer(o) for o in engine_of.chat([ASK, TALK], PARAMS)] == alone
        assert [answer(o) for o in engine_of.chat([TALK], PARAMS)] == alone[1:]
        each = engine_of.chat([ASK, TALK], [PARAMS | {"max_new_tokens": n} for n in (2, 3)])
        assert [len(o["output_ids"]) for o in each] == [2, 3]

    def test_samples_logprobs_and_streams(self, engine_of):
        params = PARAMS | {"temperature": 1.0, "seed": 1, "n": 3}
        outputs = engine_of.chat(ASK, params, return_logprob=True)
        assert len({tuple(output["output_ids"]) for output in outputs}) == 3
        assert all("output_token_logprobs" in output["meta_info"] for output in outputs)
        texts = ["", "", ""]
        for piece in engine_of.chat(ASK, params, stream=True):
            texts[piece["index"]] += piece["text"]
        assert texts == [output["text"] for output in outputs]


class TestErrors:
    CASES = (
        (None, "messages must be a list .*got None"),
        (iter(ASK), "messages must be a list .*got <list_iterator"),
        ([[]], r"messages must be a list .*got \[\]"),
        ([ASK, []], r"messages must be a list .*got \[\]"),
        ([ASK[0], ASK], r"messages\[1\] must be a dict"),
        ([ASK, ASK[0]], "messages must be a list .*got {'role'"),
    )

    @pytest.mark.parametrize(("messages", "error"), CASES)
    @pytest.mark.parametrize("stream", [False, True])
    def test_malformed_messages(self, engine, messages, error, stream):
        with pytest.raises(InvalidRequestError, match=error):
            engine.chat(messages, PARAMS, stream=stream)
        assert engine.get_internal_state().running_batch_size == 0
