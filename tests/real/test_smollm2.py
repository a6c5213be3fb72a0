"""A real model against transformers: tokens, log-probs, perplexity, texts, streams, routes."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from sgljax_engine.processing.hf_tokenizer import HFTokenizer
from sgljax_engine.processing.incremental_text import TextStream
from sgljax_engine.replies.formats import find_format
from sgljax_engine.replies.parser import ResponseParser
from sgljax_engine.replies.values import Call
from tests.golden import smollm2_texts as texts
from tests.server.served import events_of, serving

pytestmark = [pytest.mark.real, pytest.mark.slow]

GREEDY = {"temperature": 0, "max_new_tokens": texts.NUM_GREEDY}
CHAT: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
ARGUMENTS = '{"city": "S\u00e3o Paulo \U0001f327"}'
CALL = Call("get_weather", ARGUMENTS)
_JSON = f'{{"name": "{CALL.name}", "arguments": {ARGUMENTS}}}'
CALL_TEXTS = {"<tool_call>": f"<tool_call>\n{_JSON}\n</tool_call>", "<|python_tag|>": _JSON}


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    from transformers import AutoTokenizer

    return HFTokenizer(AutoTokenizer.from_pretrained(smollm2, local_files_only=True))


@pytest.fixture(scope="module")
def served(engine):
    with serving(engine) as served:
        yield served


@pytest.mark.soak
def test_tokenizer_is_the_files(tokenizer, golden):
    """4,000 strings, also tokenized by a plain BPE and by transformers from the GGUF file."""
    known = golden["tokenizer"]
    assert known["num_strings"] >= 4_000
    assert list(texts.string_digests(tokenizer.encode_rendered)) == known["digests"]


@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.soak)])
def test_greedy_tokens_and_log_probs(engine, golden, prompt_ids, every):
    """40 prompts: chat, code, ten scripts, emoji, and contexts of 1,000 and 733 tokens."""
    known = golden["prompts"]
    assert [each["name"] for each in known] == list(prompt_ids)
    assert len(known) == 40
    assert max(map(len, prompt_ids.values())) == texts.NUM_LONG
    for each in known:
        assert texts.digest(prompt_ids[each["name"]]) == each["digest"], each["name"]
    outputs = engine.generate(
        input_ids=list(prompt_ids.values())[::every], sampling_params=GREEDY, return_logprob=True
    )
    for each, output in zip(known[::every], outputs, strict=True):
        assert output["output_ids"] == each["greedy"], each["name"]
        found = [entry[0] for entry in output["meta_info"]["output_token_logprobs"]]
        np.testing.assert_allclose(found, each["logprobs"], atol=1e-4, err_msg=each["name"])
        ended = each["greedy"][-1] == 2
        assert output["meta_info"]["finish_reason"]["type"] == ("stop" if ended else "length")


@pytest.mark.soak
def test_perplexity(engine, golden):
    known = golden["perplexity"]
    ids = list(engine.tokenize(texts.perplexity_text()))
    assert len(ids) == known["num_tokens"]
    (found,) = engine.score([ids])
    perplexity = np.exp(-found.astype(np.float64).mean())
    assert perplexity == pytest.approx(known["perplexity"], abs=1e-4)


def test_streams_of_real_texts_add_up_at_every_cut(tokenizer, golden):
    """Characters of several tokens, in many scripts, wherever a stream is cut in two."""
    num_split = 0
    for each in golden["prompts"]:
        ids = [token for token in each["greedy"] if token != 2]
        whole = tokenizer.decode(ids)
        for cut in range(len(ids) + 1):
            stream, pieces = TextStream(tokenizer), []
            for part in (ids[:cut], ids[cut:]):
                stream.add(part)
                pieces.append(stream.take())
            num_split += not tokenizer.decode(ids).startswith(tokenizer.decode(ids[:cut]))
            assert "".join([*pieces, stream.finish()]) == whole, (each["name"], cut)
            assert whole.startswith(pieces[0])
    assert num_split > 50  # cuts inside of a character


@pytest.mark.soak
def test_streams_of_the_engine(engine, golden, prompt_ids):
    for name in ("chinese_chat", "emoji_family", "korean"):
        pieces = list(
            engine.generate(input_ids=prompt_ids[name], sampling_params=GREEDY, stream=True)
        )
        (known,) = (each for each in golden["prompts"] if each["name"] == name)
        whole = engine.detokenize(known["greedy"])
        assert "".join(piece["text"] for piece in pieces) == whole, name
        assert len(pieces) > 8


def test_stop_strings_across_tokens(engine, golden, prompt_ids):
    """A stop string of the last two characters of a token and the first two of the next."""
    prompts, params, expected = [], [], []
    for each in golden["prompts"]:
        ids = [token for token in each["greedy"] if token != 2]
        whole = engine.detokenize(ids)
        before, behind = (engine.detokenize(part) for part in (ids[:5], ids[5:]))
        if not whole.isascii() or whole != before + behind:
            continue
        stop = before[-2:] + behind[:2]
        prompts.append(prompt_ids[each["name"]])
        params.append({**GREEDY, "stop": [stop]})
        expected.append((whole[: whole.find(stop)], stop))
    prompts, params, expected = prompts[:16], params[:16], expected[:16]
    assert len(prompts) == 16
    outputs = engine.generate(input_ids=prompts, sampling_params=params)
    found = [(out["text"], out["meta_info"]["finish_reason"].get("matched")) for out in outputs]
    assert found == expected


def test_openais_client(served, golden):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        fields = {"model": "policy", "temperature": 0, "max_completion_tokens": 24}
        reply = client.chat.completions.create(messages=CHAT, logprobs=True, **fields)
        (choice,) = reply.choices
        assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")
        found = [each.logprob for each in choice.logprobs.content]
        assert found == pytest.approx(golden["prompts"][0]["logprobs"][: len(found)], abs=1e-4)
        assert len(found) >= len(golden["prompts"][0]["greedy"]) - 1
        events = list(client.chat.completions.create(messages=CHAT, stream=True, **fields))
        parts = [event.choices[0].delta.content or "" for event in events if event.choices]
        assert "".join(parts) == ANSWER
        text = served.engine.detokenize(
            served.engine.apply_chat_template(CHAT), skip_special_tokens=False
        )
        done = client.completions.create(
            model="policy", prompt=text, temperature=0, max_tokens=24, stop=["Paris"]
        )
        assert done.choices[0].text == ANSWER.partition("Paris")[0]


def test_sglangs_and_vllms_routes(served, golden, prompt_ids):
    body = {"input_ids": prompt_ids["capital"], "sampling_params": GREEDY}
    reply = served.ok("/generate", body)
    assert (reply["text"], reply["output_ids"]) == (ANSWER, golden["prompts"][0]["greedy"])
    with httpx.Client(base_url=served.url, timeout=60) as http:
        events = events_of(http.post("/generate", json={**body, "stream": True}))
    assert events[-1]["text"] == ANSWER  # SGLang's events hold the text so far
    tokens = served.ok("/tokenize", {"messages": CHAT})["tokens"]
    assert tokens == prompt_ids["capital"]
    text = served.ok("/detokenize", {"tokens": tokens})["prompt"]
    again = served.ok("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
    assert again == tokens
    assert "<|im_start|>" in text


def make_parser(template):
    return ResponseParser(find_format(template).template, schemas={})


@pytest.mark.parametrize("kind", sorted(CALL_TEXTS))
def test_tool_calls_at_the_cuts_of_real_tokens(tokenizer, kind):
    """Each format's text as this tokenizer cuts it, one token at a time and in two parts."""
    ids = tokenizer.encode_rendered(CALL_TEXTS[kind])
    ways = [[[token] for token in ids], *([ids[:cut], ids[cut:]] for cut in range(len(ids)))]
    for parts in ways:
        parser, stream, content = make_parser(kind), TextStream(tokenizer), []
        for part in parts:
            stream.add(part)
            content.append(parser.feed(stream.take()))
        content += [parser.feed(stream.finish()), parser.end()]
        assert ("".join(each.content for each in content).strip(), parser.calls) == ("", [CALL])
    assert len(ids) > 20
    assert any(
        "\ufffd" in tokenizer.decode([a, b]) for a, b in itertools.pairwise(ids)
    )  # the call has characters of several tokens
