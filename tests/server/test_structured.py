"""Structured output and forced tool calls over HTTP, through the official client.

The model's weights are random, so that only a grammar makes sense of what it says; `jsonschema` and
`re` judge it.
"""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import jsonschema
import llguidance
import llguidance.hf
import openai
import pytest
from transformers import AutoTokenizer

from sgljax_engine import Engine
from sgljax_engine.server.chat import ChatRequest, _ChatAnswer
from tests.engine.grammar_cases import random_case
from tests.geometry import SMALL
from tests.replies.forms import FORMS
from tests.server.scripted import TEMPLATE
from tests.server.served import FOLDER, serving

ASK: list[Any] = [{"role": "user", "content": "hi"}]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "name": {"type": "string", "maxLength": 4}},
    "required": ["x"],
    "additionalProperties": False,
}
FLAG = {"type": "object", "properties": {"is_on": {"type": "boolean"}}, "required": ["is_on"]}
FLAG["additionalProperties"] = False
PARAMETERS = {"point": POINT, "flag": FLAG}


def tool(name: str, **fields: Any) -> Any:
    function = {"name": name, "parameters": PARAMETERS.get(name, {"type": "object"}), **fields}
    return {"type": "function", "function": function}


TOOLS = [tool("point"), tool("flag")]
REQUIRED: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}


def as_format(schema: Any) -> dict[str, Any]:
    inner = {"name": "it", "schema": schema, "strict": True}
    return {"type": "json_schema", "json_schema": inner}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def served(tokenizer):
    """A model that calls tools as Qwen3 does, and thinks."""
    with Engine(FOLDER, tokenizer=tokenizer, **SMALL) as engine, serving(engine) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, **options: Any) -> list[Any]:
    """The choices of a reply; a stream's are put together. Thoughts end."""
    body = {"max_thinking_tokens": 4, **options.pop("extra_body", {})}
    options["extra_body"] = body
    fields = {"messages": ASK, "temperature": 1, "seed": 5, "max_completion_tokens": 300}
    reply: Any = client.chat.completions.create(model="policy", **{**fields, **options})
    if not options.get("stream"):
        return [(each.message, each.finish_reason) for each in reply.choices]
    parts: dict[int, Any] = {}
    for chunk in reply:
        for each in chunk.choices:
            message = parts.setdefault(each.index, {"content": "", "tool_calls": []})
            message["content"] += each.delta.content or ""
            message["tool_calls"] += each.delta.tool_calls or []
            message["reason"] = each.finish_reason
    return [(SimpleNamespace(**each), each["reason"]) for _, each in sorted(parts.items())]


def call_of(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def check_call(call: Any) -> str:
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])
    return call.function.name


class TestContent:
    def test_generated_grammars(self, client):
        """JSON Schemas as `response_format`, and all kinds as vLLM's `structured_outputs`."""
        for seed in range(8):
            case = random_case(seed)
            options: dict[str, Any] = {"extra_body": {"structured_outputs": case.outputs}}
            if case.kind == "json":
                options = {"response_format": as_format(case.value)}
            elif case.kind == "json_object":
                options = {"response_format": {"type": "json_object"}}
            options |= {"stream": bool(seed % 2), "max_completion_tokens": 100}
            for message, reason in chat(client, n=2, **options):
                assert reason in ("stop", "length")
                if reason == "stop":
                    case.check(message.content)

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_schema(self, client, stream):
        for message, reason in chat(client, n=4, response_format=as_format(POINT), stream=stream):
            jsonschema.validate(json.loads(message.content), POINT)
            assert reason == "stop"

    def test_completions(self, client):
        fields = {"model": "policy", "prompt": "the fox", "max_tokens": 300, "seed": 5, "n": 3}
        body = {"response_format": as_format(POINT)}
        for choice in client.completions.create(**fields, extra_body=body).choices:
            jsonschema.validate(json.loads(choice.text), POINT)
        body = {"structured_outputs": {"regex": "[ab]{3}|[0-9]"}}
        for choice in client.completions.create(**fields, extra_body=body).choices:
            assert re.fullmatch("[ab]{3}|[0-9]", choice.text)

    def test_thoughts_come_first(self, client):
        """They are free up to their budget, whether the prompt opens them or not."""
        for think in (True, False):
            for name in ("max_thinking_tokens", "thinking_token_budget"):
                body = {
                    "max_thinking_tokens": None,
                    name: 6,
                    "chat_template_kwargs": {"think": think},
                }
                for message, reason in chat(
                    client, n=4, response_format=as_format(FLAG), extra_body=body
                ):
                    jsonschema.validate(json.loads(message.content), FLAG)
                    assert reason == "stop"
                    assert hasattr(message, "reasoning_content") or not think

    def test_thoughts_that_stay_in_the_content(self, client):
        body = {"max_thinking_tokens": 4, "chat_template_kwargs": {"think": True}}
        options = {"extra_body": {**body, "separate_reasoning": False}}
        ((message, _),) = chat(client, response_format=as_format(FLAG), **options)
        thoughts, _, content = message.content.partition("</think>")
        assert thoughts
        jsonschema.validate(json.loads(content), FLAG)

    def test_a_budget_alone(self, client):
        body = {"max_thinking_tokens": 5, "chat_template_kwargs": {"think": True}}
        ((message, _),) = chat(client, extra_body={**body, "ignore_eos": True})
        assert message.reasoning_content
        assert message.content


FORMATS = ["qwen3-coder", "llama3", "gemma4", "mistral", "mistral-args", "deepseek", "gpt-oss"]


class TestCalls:
    @pytest.mark.parametrize("stream", [False, True])
    def test_required(self, client, stream):
        for message, reason in chat(client, n=4, stream=stream, **REQUIRED):
            assert [check_call(call) for call in message.tool_calls]
            if reason != "length":  # the model's weights like one more call
                assert not message.content
                assert reason == "tool_calls"

    def test_at_most_one(self, client):
        for seed in range(4):
            for message, reason in chat(client, seed=seed, parallel_tool_calls=False, **REQUIRED):
                assert len([check_call(call) for call in message.tool_calls]) == 1
                assert reason == "tool_calls"

    @pytest.mark.parametrize("name", PARAMETERS)
    def test_a_named_one(self, client, name):
        choice = {"type": "function", "function": {"name": name}}
        for message, reason in chat(client, n=2, tools=TOOLS, tool_choice=choice):
            assert [check_call(call) for call in message.tool_calls] == [name]
            assert reason == "tool_calls"

    def test_behind_thoughts(self, client):
        body = {"max_thinking_tokens": 3, "chat_template_kwargs": {"think": True}}
        options = {**REQUIRED, "parallel_tool_calls": False, "extra_body": body}
        for message, reason in chat(client, n=2, **options):
            assert message.reasoning_content
            assert [check_call(call) for call in message.tool_calls]
            assert reason == "tool_calls"

    @pytest.mark.parametrize("name", FORMATS)
    def test_in_other_formats(self, client, tokenizer, monkeypatch, name):
        """A call, and then content, behind thoughts where the format has them."""
        form = FORMS[name]
        template = f"{{# {form.template} #}}{{{{ messages[0].content }}}}{form.head}"
        monkeypatch.setattr(tokenizer, "chat_template", template)
        options = {**REQUIRED, "parallel_tool_calls": False}
        if form.think is None:
            options["extra_body"] = {"max_thinking_tokens": None}
        for message, reason in chat(client, **options):
            assert len([check_call(call) for call in message.tool_calls]) == 1
            assert (reason, message.content) == ("tool_calls", None)
        del options["tools"], options["tool_choice"], options["parallel_tool_calls"]
        choices = {"structured_outputs": {"choice": ["yes", "no"]}}
        options["extra_body"] = {**options.get("extra_body", {}), **choices}
        for message, reason in chat(client, **options):
            assert reason == "stop"
            assert message.content in ("yes", "no")

    def test_strict_tools(self, served, client):
        """Text is free, and a call of a strict tool follows its schema once it begins."""
        strict = [tool("point", strict=True), tool("flag")]
        for message, _ in chat(client, n=2, tools=strict, max_completion_tokens=40):
            assert [check_call(call) for call in message.tool_calls or []] in ([], ["point"])
        body = ChatRequest.model_validate({"messages": ASK, "tools": strict})
        (params,) = _ChatAnswer(served.server._context, body).job.sampling_params
        outputs = params.structured_outputs or {}
        grammar = llguidance.LLMatcher.grammar_from_lark(outputs["grammar"])
        tokens = llguidance.hf.from_tokenizer(AutoTokenizer.from_pretrained(FOLDER))
        for text, is_allowed in [
            ("Hm.", True),
            (call_of("point", '{"x": 1}'), True),
            (call_of("flag", '{"any": "thing"}'), True),
            ("Hm. " + call_of("point", '{"x": 1, "name": "abcd"}'), True),
            (call_of("point", '{"x": 1}') + "\n" + call_of("flag", "{}"), True),
            (call_of("point", '{"x": "1"}'), False),
            (call_of("point", "{}"), False),
            (call_of("other", "{}"), False),
            ("<tool_call> is a mark", False),
        ]:
            matcher = llguidance.LLMatcher(tokens, grammar, log_level=0)
            ids = tokens.tokenize_str(text)
            is_whole = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            assert is_whole == is_allowed, text

    def test_a_call_or_structured_content(self, client):
        """The model decides; it begins with a call or with JSON."""
        seen = set()
        for seed in range(4):
            strict = [tool(name, strict=True) for name in PARAMETERS]
            options = {"seed": seed, "tools": strict, "response_format": as_format(FLAG)}
            for message, reason in chat(client, n=2, **options):
                if message.tool_calls:
                    assert [check_call(call) for call in message.tool_calls]
                elif reason == "stop":
                    jsonschema.validate(json.loads(message.content), FLAG)
                seen.add(reason)
        assert "stop" in seen or "tool_calls" in seen


JSON = {"response_format": {"type": "json_object"}}
BAD = {"type": "object", "properties": {"x": {"type": "int"}}}
NAMED = {"type": "function", "function": {"name": "other"}}
CUT = [*ASK, {"role": "assistant", "content": "{"}]


class TestRefused:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"response_format": as_format(BAD)}, "response_format cannot be followed: .*int"),
            ({"response_format": {"type": "json_schema"}}, "'json_schema' needs json_schema"),
            ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
             "response_format.json_schema.name is missing"),
            ({"response_format": {**as_format(FLAG), "type": "json_object"}}, "goes without json"),
            ({"response_format": {"type": "structural_tag", "structures": []}},
             "response_format.type='structural_tag' is not supported"),
            ({"response_format": {"type": "json_object", "schema": FLAG}}, "use .*json_schema"),
            ({"structured_outputs": {"regex": "(a"}}, "structured_outputs cannot be followed: "),
            ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs cannot be"),
            ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "must have one of json"),
            ({"structured_outputs": {"regexp": "a"}}, "did you mean 'regex'"),
            ({"structured_outputs": {"structural_tag": "x", "regex": "a"}}, "structural_tag"),
            ({"guided_json": FLAG}, "guided_json=.* is not supported: use structured_outputs"),
            ({"regex": "a"}, "regex='a' is not supported: use structured_outputs"),
            ({"structured_outputs": {"regex": "a"}, **JSON}, "contradicts structured_outputs"),
            ({**JSON, "ignore_eos": True}, "ignore_eos=True goes without response_format"),
            ({**JSON, "min_tokens": 3}, "min_tokens=3 goes without response_format"),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
    def test_both_routes(self, served, path, fields, message):
        own = {"messages": ASK} if "chat" in path else {"prompt": "a"}
        check_refused(served, path, {**own, **fields}, message)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({**JSON, **REQUIRED}, "response_format contradicts tool_choice"),
            ({"tool_choice": "required"}, "tool_choice needs tools to call"),
            ({"tools": TOOLS, "tool_choice": NAMED}, "one of .'point', 'flag'., got 'other'"),
            ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tools are functions"),
            ({"tools": [tool("f", parameters=BAD)], "tool_choice": "required"}, "the tool 'f' can"),
            ({"tools": [tool("f", parameters=BAD, strict=True)]}, "of the tool 'f' cannot be foll"),
            ({"tools": [tool("f f")], "tool_choice": "required"}, "got 'f f'"),
            ({**REQUIRED, "min_tokens": 3}, "min_tokens=3 goes without tool_choice"),
            ({**REQUIRED, "messages": CUT, "continue_final_message": True}, "goes without tool_ch"),
            ({**JSON, "messages": CUT, "continue_final_message": True}, "goes without response_f"),
            ({"tools": TOOLS, "structured_outputs": {"grammar": 'start: "a"'}}, "neither with"),
            ({"max_thinking_tokens": 3, "thinking_token_budget": 4}, "contradicts thinking"),
            ({"max_thinking_tokens": -1}, "max_thinking_tokens: .*greater than or equal to 0"),
        ],
    )  # fmt: skip
    def test_chat(self, served, fields, message):
        check_refused(served, "/v1/chat/completions", {"messages": ASK, **fields}, message)

    def test_a_model_without_thoughts_or_calls(self, golden):
        with serving(golden) as served:
            for fields, message in [
                ({"max_thinking_tokens": 3}, "needs a chat template with known marks of thoughts"),
                (REQUIRED, "tools need a chat template"),
            ]:
                check_refused(served, "/v1/chat/completions", {"messages": ASK, **fields}, message)


def check_refused(served: Any, path: str, body: Any, message: str) -> None:
    before = served.engine.get_progress()
    reply = served.post(path, body)
    assert reply.status_code == 400, reply.text
    assert re.search(message, reply.json()["error"]["message"]), reply.text
    assert served.engine.get_progress() == before


class TestGenerate:
    @pytest.mark.parametrize(
        ("fields", "outputs"),
        [
            ({"json_schema": json.dumps(FLAG)}, {"json": FLAG}),
            ({"json_schema": FLAG}, {"json": FLAG}),
            ({"regex": "[ab]{2,4}"}, {"regex": "[ab]{2,4}"}),
            ({"ebnf": 'root ::= "x" | "yz"'}, {"grammar": 'root ::= "x" | "yz"'}),
            ({"structured_outputs": {"choice": ["one", "two"]}}, {"choice": ["one", "two"]}),
        ],
    )
    def test_sglangs_names(self, served, fields, outputs):
        params = {"seed": 3, "max_new_tokens": 100}
        body = {"text": "the fox", "sampling_params": {**params, **fields}}
        own = {**params, "structured_outputs": outputs}
        expected = served.engine.generate("the fox", own)
        reply = served.ok("/generate", body)
        assert reply["output_ids"] == expected["output_ids"]
        assert reply["meta_info"]["finish_reason"]["type"] == "stop"

    def test_a_budget(self, served):
        params = {"reasoning_tags": ["", "</think>"], "max_thinking_tokens": 4, "ignore_eos": True}
        body = {"text": "a", "sampling_params": {**params, "max_new_tokens": 30, "seed": 3}}
        assert "</think>" in served.ok("/generate", body)["text"]

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"structural_tag": "x"}, "structural_tag='x' is not supported"),
            ({"regex": "a", "ebnf": 'root ::= "a"'}, "structured_outputs must be given once"),
            ({"regex": "(a"}, "structured_outputs does not compile"),
            ({"json_schema": "{"}, "must be JSON"),
            ({"max_thinking_tokens": 4}, "needs reasoning_tags"),
        ],
    )
    def test_refused(self, served, fields, message):
        check_refused(served, "/generate", {"text": "a", "sampling_params": fields}, message)
