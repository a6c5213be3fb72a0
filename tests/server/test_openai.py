"""OpenAI's routes, through the official Python client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.server.scripted import CALL, TOOLS

ASK: list[Any] = [{"role": "user", "content": "hi"}]
IDS = {"return_token_ids": True, "return_weight_versions": True}


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client, prompt, **options):
    fields = {"model": "policy", "temperature": 0, "max_tokens": 12, **options}
    return client.completions.create(prompt=prompt, **fields)


def chat(client, messages, **options):
    fields = {"model": "policy", "temperature": 0, "max_completion_tokens": 12, **options}
    return client.chat.completions.create(messages=messages, **fields)


def generate(served, ids, **params):
    """The same in process."""
    defaults = served.engine.get_default_sampling_params().to_dict()
    params = {**defaults, "temperature": 0, "max_new_tokens": 12, **params}
    return served.engine.generate(input_ids=ids, sampling_params=params, return_logprob=True)


class TestCompletions:
    def test_text_ids_versions_and_usage(self, served, client):
        reply = complete(client, "the fox", extra_body=IDS)
        (choice,) = reply.choices
        prompt = served.engine.tokenize("the fox")
        own = generate(served, prompt)
        assert choice.text == own["text"]
        assert choice.token_ids == own["output_ids"]
        assert choice.prompt_token_ids == prompt
        assert choice.weight_versions == own["meta_info"]["token_weight_versions"]
        assert choice.finish_reason == own["meta_info"]["finish_reason"]["type"]
        usage = reply.usage
        counts = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
        assert counts == (len(prompt), len(own["output_ids"]), len(prompt) + len(own["output_ids"]))
        assert reply.object == "text_completion"

    @pytest.mark.parametrize("kind", ["texts", "ids", "lists of ids"])
    def test_kinds_of_prompts(self, served, client, kind):
        texts = ["the fox", "lazy"]
        ids = [served.engine.tokenize(text) for text in texts]
        prompt = {"texts": texts, "ids": ids[0], "lists of ids": ids}[kind]
        found = [choice.text for choice in complete(client, prompt).choices]
        assert found == [generate(served, each)["text"] for each in ids][: len(found)]
        assert len(found) == (1 if kind == "ids" else 2)

    def test_log_probs_of_prompt_and_output(self, served, client):
        (choice,) = complete(client, "the fox", logprobs=2, echo=True, extra_body=IDS).choices
        ids = choice.prompt_token_ids + choice.token_ids
        own = served.engine.score([ids])[0]
        found = choice.logprobs
        assert found.token_logprobs[0] is None
        assert found.token_logprobs[1:] == pytest.approx(own.tolist(), abs=1e-4)
        assert found.tokens == [served.engine.detokenize([i]) for i in ids]
        assert choice.text == "the fox" + served.engine.detokenize(choice.token_ids)
        for offset, token in zip(found.text_offset[:5], found.tokens[:5], strict=True):
            assert choice.text[offset:].startswith(token)

    def test_offsets_of_characters_in_parts(self, client):
        """A token inside a character is where the character begins."""
        text = "a\u5317 b\U0001f327\u5317c"
        (choice,) = complete(client, text, logprobs=0, echo=True, max_tokens=0).choices
        found, offsets = choice.logprobs, choice.logprobs.text_offset
        assert "\ufffd" in found.tokens
        assert offsets == sorted(offsets)
        for offset, token in zip(offsets, found.tokens, strict=True):
            assert "\ufffd" in token or text.startswith(token, offset)
        assert text[offsets[-1] :] == "c"

    def test_a_text_that_has_its_bos(self, served, client):
        text = served.engine.detokenize(served.engine.tokenize("the fox"), skip_special_tokens=None)
        body = {**IDS, "add_special_tokens": False}
        (choice,) = complete(client, text, extra_body=body).choices
        assert choice.prompt_token_ids == served.engine.tokenize("the fox")

    def test_sampling_masks(self, served, client):
        body = {**IDS, "return_sampling_mask": True, "top_k": 4}
        (choice,) = complete(client, "the fox", seed=3, temperature=1, extra_body=body).choices
        csr = choice.sampling_mask
        assert len(csr["offsets"]) == len(choice.token_ids) + 1
        assert csr["offsets"][-1] == len(csr["token_ids"]) <= 4 * len(choice.token_ids)
        for place, token in enumerate(choice.token_ids):
            begin, end = csr["offsets"][place : place + 2]
            assert token in csr["token_ids"][begin:end]
        assert len(choice.sampling_logprobs) == len(choice.token_ids)

    def test_samples_seed_and_stop(self, served, client):
        options = {"n": 3, "seed": 7, "temperature": 1, "stop": ["e"], "max_tokens": 20}
        found = [choice.text for choice in complete(client, "the fox", **options).choices]
        params = {"n": 3, "seed": 7, "temperature": 1, "stop": ["e"], "max_new_tokens": 20}
        ids = served.engine.tokenize("the fox")
        assert found == [each["text"] for each in generate(served, ids, **params)]

    def test_vllms_own_fields(self, served, client):
        own_names = {"top_k": 1, "min_tokens": 3, "ignore_eos": True, "repetition_penalty": 1.5}
        (choice,) = complete(
            client, "the fox", temperature=1, extra_body={**IDS, **own_names}
        ).choices
        params = {"top_k": 1, "min_new_tokens": 3, "ignore_eos": True, "repetition_penalty": 1.5}
        own = generate(served, served.engine.tokenize("the fox"), temperature=1, **params)
        assert choice.token_ids == own["output_ids"]

    def test_a_stream_adds_up(self, client):
        options = {"n": 2, "seed": 3, "temperature": 1, "logprobs": 1}
        whole = complete(client, "the fox", extra_body=IDS, **options)
        chunks = list(
            complete(
                client,
                "the fox",
                stream=True,
                stream_options={"include_usage": True},
                extra_body=IDS,
                **options,
            )
        )
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
        for index, choice in enumerate(whole.choices):
            own = [each for chunk in chunks for each in chunk.choices if each.index == index]
            assert "".join(each.text for each in own) == choice.text
            assert [i for each in own for i in each.token_ids] == choice.token_ids
            assert [i for each in own for i in each.weight_versions] == choice.weight_versions
            logprobs = [p for each in own for p in each.logprobs.token_logprobs]
            assert logprobs == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
            offsets = [o for each in own for o in each.logprobs.text_offset]
            assert offsets == choice.logprobs.text_offset
            assert own[0].prompt_token_ids == choice.prompt_token_ids
            assert [each.finish_reason for each in own[:-1]] == [None] * (len(own) - 1)
            assert own[-1].finish_reason == choice.finish_reason

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_tokens": 9999}, r"max_tokens \(9999\).*the limit is max_model_len"),
            ({"max_tokens": 0}, "max_tokens=0 needs echo=true"),
            ({"logprobs": 200}, "logprobs: .*128"),
        ],
    )
    def test_refused(self, client, options, message):
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            complete(client, "the fox", **options)
        assert caught.value.body["type"] == "invalid_request_error"  # type: ignore[index]

    def test_a_prompt_that_ends_inside_a_character(self, served, client):
        """Its character is whole in the echo, and belongs to the output that completes it."""
        ids = served.engine.tokenize("a\u00e9", add_special_tokens=False)
        options = {"max_tokens": 3, "logit_bias": {str(ids[-1]): 100}, "extra_body": IDS}
        for echo, start in ((True, "a\u00e9"), (False, "\u00e9")):
            (choice,) = complete(client, ids[:-1], echo=echo, **options).choices
            assert choice.text.startswith(start)
            assert choice.token_ids[0] == ids[-1]
            chunks = list(complete(client, ids[:-1], echo=echo, stream=True, **options))
            assert "".join(each.choices[0].text for each in chunks) == choice.text
        broken = {"max_tokens": 1, "logit_bias": {str(ids[0]): 100}}
        (choice,) = complete(client, ids[:-1], echo=True, **broken).choices
        assert choice.text == "a\ufffda"

    def test_the_default_of_tokens_is_cut_to_what_fits(self, served, client):
        prompt = [5] * (served.engine.max_model_len - 4)
        body = {"ignore_eos": True}
        reply = complete(client, prompt, max_tokens=openai.NOT_GIVEN, extra_body=body)
        assert reply.usage.completion_tokens == 4
        reply = complete(client, prompt, max_tokens=None, extra_body=body)
        assert reply.usage.completion_tokens == 4


class TestModels:
    def test_one_by_its_name(self, served, client):
        assert client.models.retrieve("policy") == client.models.list().data[0]

    @pytest.mark.parametrize(
        "call",
        [
            lambda client: complete(client, "the fox", model="gpt-4"),
            lambda client: chat(client, ASK, model="gpt-4", stream=True),
            lambda client: client.models.retrieve("gpt-4"),
        ],
    )
    def test_one_that_is_not_served(self, client, call):
        with pytest.raises(
            openai.NotFoundError, match="'gpt-4' is not served; served: 'policy'"
        ) as e:
            call(client)
        assert (e.value.code, e.value.param) == ("model_not_found", "model")


class TestChat:
    def test_is_the_engines_chat(self, served, client):
        reply = chat(client, ASK, extra_body=IDS)
        params = {"temperature": 0, "max_new_tokens": 12}
        own = served.engine.chat(ASK, params)
        (choice,) = reply.choices
        assert choice.message.content == own["text"]
        assert choice.message.role == "assistant"
        assert choice.token_ids == choice.message.token_ids == own["output_ids"]
        assert reply.prompt_token_ids == served.engine.apply_chat_template(ASK)
        assert reply.usage.prompt_tokens == len(reply.prompt_token_ids)

    def test_a_cut_answer_goes_on(self, served, client):
        """As if it had not been cut."""
        whole = chat(client, ASK, max_completion_tokens=12, extra_body=IDS).choices[0].message
        first = chat(client, ASK, max_completion_tokens=5, extra_body=IDS).choices[0].message
        go_on = {"continue_final_message": True, **IDS}
        rest = chat(client, [*ASK, first], max_completion_tokens=7, extra_body=go_on)
        assert first.token_ids + rest.choices[0].token_ids == whole.token_ids
        with pytest.raises(openai.BadRequestError, match="needs add_generation_prompt=False"):
            chat(client, [*ASK, first], extra_body={**go_on, "add_generation_prompt": True})

    def test_without_a_limit_it_may_fill_the_context(self, served, client):
        options = {"max_completion_tokens": openai.NOT_GIVEN, "extra_body": {"ignore_eos": True}}
        reply = chat(client, ASK, **options)
        assert reply.choices[0].finish_reason == "length"
        assert reply.usage.total_tokens == served.engine.max_model_len

    def test_log_probs(self, served, client):
        (choice,) = chat(client, ASK, logprobs=True, top_logprobs=3, extra_body=IDS).choices
        prompt = served.engine.apply_chat_template(ASK)
        own = served.engine.score([prompt + choice.token_ids], start_lens=[len(prompt)])[0]
        entries = choice.logprobs.content
        assert [each.logprob for each in entries] == pytest.approx(own.tolist(), abs=1e-4)
        for entry, token in zip(entries, choice.token_ids, strict=True):
            assert entry.token == served.engine.detokenize([token])
            assert len(entry.top_logprobs) == 3
            known = bytes(entry.bytes)
            assert known.decode(errors="replace") == entry.token

    def test_bytes_of_a_character_in_parts(self, served, client):
        ids = served.engine.tokenize("\u5317", add_special_tokens=False)
        assert len(ids) > 1
        found = b""
        for token in ids:
            bias = {str(token): 100}
            (choice,) = chat(
                client, ASK, logprobs=True, logit_bias=bias, max_tokens=1, max_completion_tokens=1
            ).choices
            (entry,) = choice.logprobs.content
            found += bytes(entry.bytes)
        assert found == "\u5317".encode()

    def test_parts_of_content_and_a_developer(self, client):
        parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
        system = {"role": "system", "content": "be brief"}
        plain = chat(client, [system, *ASK])
        other = chat(client, [{**system, "role": "developer"}, {"role": "user", "content": parts}])
        assert plain.choices[0].message.content == other.choices[0].message.content

    def test_a_stream_adds_up(self, client):
        options = {"n": 2, "seed": 3, "temperature": 1, "logprobs": True}
        whole = chat(client, ASK, extra_body=IDS, **options)
        usage = {"include_usage": True}
        chunks = list(
            chat(client, ASK, stream=True, stream_options=usage, extra_body=IDS, **options)
        )
        assert chunks[0].prompt_token_ids == whole.prompt_token_ids
        assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
        for index, choice in enumerate(whole.choices):
            own = [each for chunk in chunks for each in chunk.choices if each.index == index]
            assert own[0].delta.role == "assistant"
            assert "".join(each.delta.content or "" for each in own) == choice.message.content
            assert [i for each in own[1:] for i in each.token_ids] == choice.token_ids
            logprobs = [p.logprob for each in own[1:] for p in each.logprobs.content]
            expected = [p.logprob for p in choice.logprobs.content]
            assert logprobs == pytest.approx(expected, abs=1e-4)
            assert own[-1].finish_reason == choice.finish_reason

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_tokens": 3}, "max_tokens=3 contradicts max_completion_tokens=12"),
            ({"top_logprobs": 3}, "top_logprobs=3 needs logprobs=true"),
            ({"messages": []}, "messages: List should have at least 1"),
            ({"messages": [{"role": "user"}]}, "messages.0.content is missing"),
            ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
            ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools need a chat"),
        ],
    )
    def test_refused(self, client, options, message):
        given = dict(options)
        messages = given.pop("messages", ASK)
        with pytest.raises(openai.BadRequestError, match=message):
            chat(client, messages, **given)


class TestTokenExactTurns:
    """A conversation keeps its ids although their text would be tokenized otherwise."""

    def test_over_three_turns(self, served, client):
        messages = list(ASK)
        before: list[int] = []
        drifts = 0
        for turn in range(3):
            reply = chat(client, messages, temperature=1, seed=turn, extra_body=IDS)
            prompt, message = reply.prompt_token_ids, reply.choices[0].message
            assert prompt[: len(before)] == before
            anew = served.engine.tokenize(message.content, add_special_tokens=False)
            drifts += anew != message.token_ids
            before = prompt + message.token_ids
            messages += [message, {"role": "user", "content": f"and {turn}?"}]
        assert drifts == 3, "the tokenizer does not drift: the test shows nothing"

    def test_a_message_that_was_changed_is_refused(self, client):
        message = chat(client, ASK, extra_body=IDS).choices[0].message
        other = [{"role": "user", "content": "hello"}]
        with pytest.raises(openai.BadRequestError, match="are not the ids of the messages before"):
            chat(client, [*other, message, *ASK])

    def test_the_prefix_cache_serves_every_turn(self, served, client):
        served.engine.flush_cache()
        first = chat(client, ASK, extra_body=IDS)
        message = first.choices[0].message
        again = chat(client, [*ASK, message, *ASK])
        num_before = len(first.prompt_token_ids) + len(message.token_ids)
        cached = again.usage.prompt_tokens_details.cached_tokens
        assert cached >= (num_before - 1) // 4 * 4 - 4  # whole pages of 4 tokens


@pytest.fixture(scope="module")
def script(tokenizer, scripted):
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none") as client:
        yield tokenizer, client


class TestToolsAndThoughts:
    def ask(self, script, text, **options) -> Any:
        tokenizer, client = script
        tokenizer.text = text
        try:
            fields = {"max_completion_tokens": len(text), "extra_body": {"ignore_eos": True}}
            reply = chat(client, ASK, **{**fields, **options})
            return list(reply) if options.get("stream") else reply
        finally:
            tokenizer.text = ""

    def test_a_call(self, script):
        text = f"I add.<tool_call>\n{CALL}\n</tool_call>"
        (choice,) = self.ask(script, text, tools=TOOLS).choices
        (call,) = choice.message.tool_calls
        assert choice.message.content == "I add."
        assert (call.type, call.function.name) == ("function", "add")
        assert call.function.arguments == '{"x": 1}'

    def test_a_stream_of_calls(self, script):
        text = f"So:<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>"
        chunks = self.ask(script, text, tools=TOOLS, stream=True)
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == "So:"
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        assert [call.index for call in calls] == [0, 1]
        assert [call.function.name for call in calls] == ["add", "add"]

    @pytest.mark.parametrize(
        "text",
        [
            '<tool_call>{"name": "say", "arguments": "hello"}</tool_call>',
            '<tool_call>{"name": "now", "arguments": null}</tool_call>',
            '<tool_call>{"name": "now", "arguments": ""}</tool_call>',
            '<tool_call>{"name": "note", "arguments": {"t": "</tool_call>"}}</tool_call>',
            '<tool_call>{"name": "say", "arguments": NaN}</tool_call>',
        ],
    )
    @pytest.mark.parametrize("with_ids", [True, False])
    def test_every_reply_may_come_back(self, script, text, with_ids):
        body = {"ignore_eos": True, "return_token_ids": with_ids}
        message = self.ask(script, text, tools=TOOLS, extra_body=body).choices[0].message
        for call in message.tool_calls or []:
            assert isinstance(json.loads(call.function.arguments), dict)
        _, client = script
        answer = [{"role": "tool", "tool_call_id": "x", "content": "2"}]
        later = answer if message.tool_calls else ASK
        for given in (message, message.model_dump(exclude_none=True)):
            assert chat(client, [*ASK, given, *later], tools=TOOLS).choices

    def test_other_names_of_thoughts(self, script):
        _, client = script
        for thoughts in ({"reasoning": "hm"}, {"reasoning": "hm", "reasoning_content": "hm"}):
            message = {"role": "assistant", "content": "x", **thoughts}
            assert chat(client, [*ASK, message, *ASK], tools=TOOLS).choices
        message = {"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": "b"}
        with pytest.raises(openai.BadRequestError, match=r"1\.reasoning contradicts"):
            chat(client, [*ASK, message, *ASK])

    def test_a_template_for_tools_of_its_own(self, script):
        tokenizer, _ = script
        inner = tokenizer._tokenizer
        template = inner.chat_template
        inner.chat_template = {"default": "{{ messages[0].content }}", "tool_use": template}
        try:
            message = self.ask(script, f"<tool_call>{CALL}</tool_call>", tools=TOOLS)
            assert message.choices[0].message.tool_calls
        finally:
            inner.chat_template = template

    @pytest.mark.parametrize("arguments", ['{"v": ', "hello", [1], "[1]", None, "", '{"x": 1}'])
    def test_history_with_any_arguments(self, script, arguments):
        """Also of other servers: the template gets what is there."""
        tokenizer, client = script
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        assert chat(client, [*ASK, message, *ASK], tools=TOOLS).choices
        message |= {"content": "hm", "token_ids": tokenizer.encode("hm")}
        reply = chat(client, [*ASK, message, *ASK], tools=TOOLS, extra_body=IDS)
        assert reply.choices

    def test_a_call_in_thoughts_that_are_never_closed(self, script):
        text = f"I add.<tool_call>{CALL}</tool_call>"
        body = {"ignore_eos": True, "chat_template_kwargs": {"think": True}}
        (choice,) = self.ask(script, text, tools=TOOLS, extra_body=body).choices
        assert [call.function.name for call in choice.message.tool_calls] == ["add"]
        assert (choice.message.content, choice.message.reasoning_content) == (None, "I add.")
        chunks = self.ask(script, text, tools=TOOLS, extra_body=body, stream=True)
        deltas = [each.delta for chunk in chunks for each in chunk.choices]
        assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "I add."
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        assert [call.function.name for call in calls] == ["add"]

    def test_one_call_where_parallel_ones_are_not_wanted(self, script):
        text = f"<tool_call>{CALL}</tool_call>" * 2
        for stream in (True, False):
            reply = self.ask(script, text, tools=TOOLS, parallel_tool_calls=False, stream=stream)
            chunks = reply if stream else [reply]
            parts = [each for chunk in chunks for each in chunk.choices]
            parts = [each.delta if stream else each.message for each in parts]
            assert sum(len(part.tool_calls or []) for part in parts) == 1

    def test_without_tools_it_is_content(self, script):
        text = f"<tool_call>{CALL}</tool_call>"
        for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            message = self.ask(script, text, **options).choices[0].message
            assert message.content == text
            assert not message.tool_calls

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        "text", ["9.8 or 9?</think>It is 9.8.", "<think>9.8</think>It is 9.8."]
    )
    def test_stop_strings_count_behind_thoughts(self, script, text, stream):
        think = not text.startswith("<think>")
        body = {"ignore_eos": True, "chat_template_kwargs": {"think": think}}
        reply = self.ask(script, text, extra_body=body, stop=["9.8"], stream=stream)
        chunks = reply if stream else [reply]
        parts = [each for chunk in chunks for each in chunk.choices]
        assert parts[-1].finish_reason == "stop"
        messages = [each.delta if stream else each.message for each in parts]
        assert "".join(each.content or "" for each in messages) == "It is "
        reasoning = "".join(getattr(each, "reasoning_content", None) or "" for each in messages)
        assert reasoning == text.removeprefix("<think>").partition("</think>")[0]

    def test_without_thoughts_stop_strings_count_at_once(self, script):
        message = self.ask(script, "It is 9.8.", stop=["9.8"]).choices[0].message
        assert message.content == "It is "
        body = {"ignore_eos": True, "separate_reasoning": False}
        text = "<think>9.8</think>yes"
        message = self.ask(script, text, stop=["9.8"], extra_body=body).choices[0].message
        assert message.content == "<think>"

    def test_thoughts_may_stay_in_the_content(self, script):
        body = {"ignore_eos": True, "separate_reasoning": False}
        message = self.ask(script, "<think>hm</think>yes", extra_body=body).choices[0].message
        assert message.content == "<think>hm</think>yes"
