"""What grammars of replies let through, our parser reads back, and `jsonschema` finds it valid.

The texts are random walks of an llguidance matcher over bytes and special tokens.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest

from sgljax_engine import InvalidRequestError
from sgljax_engine.processing.vocabulary import Vocabulary, grammar_of
from sgljax_engine.replies.formats import ReplyFormat, find_format
from sgljax_engine.replies.grammars import ReplyWriter
from sgljax_engine.replies.parser import ResponseParser, Split
from tests.replies.forms import FORMS, deepseek

TEMPLATES = {
    **{name: form.template for name, form in FORMS.items() if form.call is not None},
    "deepseek-r1": FORMS["deepseek"].template + "```json",
}
HEADS = {name: FORMS.get(name, FORMS["deepseek"]).head for name in TEMPLATES}
MARKS = [
    "<tool_call>", "</tool_call>", "<|tool_call>", "<tool_call|>", '<|"|>', "[TOOL_CALLS]",
    "[ARGS]", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>",
    *map(deepseek, ["<|tool calls begin|>", "<|tool calls end|>", "<|tool call begin|>",
                    "<|tool call end|>", "<|tool sep|>"]),
]  # fmt: skip
CLOSING = [
    b'"',
    b"}",
    b"]",
    b"\n</parameter>\n",
    b'<|"|>',
    b"<|end|>",
    b"<|end|><|start|>assistant",
]
"""What a walk prefers now and then, so that it ends."""


class Bytes:
    """A tokenizer whose tokens are bytes, and marks if these are special."""

    def __init__(self, marks: Sequence[str]) -> None:
        self.special_tokens = marks
        self.special = {mark: 256 + number for number, mark in enumerate(marks)}
        self.end = 256 + len(marks)  # the end of an output is behind the vocabulary

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else self.special_tokens[token - 256].encode()

    def encode_rendered(self, text: str) -> list[int]:
        return list(text.encode())


TOKENIZERS = {"special marks": Bytes(MARKS), "marks of text": Bytes([])}
VOCABULARIES = {
    name: Vocabulary(each, each.end, [])  # type: ignore[arg-type]
    for name, each in TOKENIZERS.items()
}


def random_text(kind: str, grammar: str, rng: random.Random) -> str:
    """A random text of a grammar."""
    tokenizer = TOKENIZERS[kind]
    matcher = VOCABULARIES[kind].matcher(grammar_of({"grammar": grammar}))
    closing = [
        [tokenizer.special[each.decode()]] if each.decode() in tokenizer.special else list(each)
        for each in CLOSING
    ]
    ids: list[int] = []
    while len(ids) < 4000:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        assert allowed, (bytes(ids), matcher.get_error())
        if tokenizer.end in allowed and (len(allowed) == 1 or rng.random() < 0.4):
            return b"".join(map(tokenizer.token_bytes, ids)).decode()
        found = [rng.choice([token for token in allowed if token != tokenizer.end])]
        if rng.random() < 0.3:
            ends = [each for each in closing if matcher.validate_tokens(each) == len(each)]
            found = rng.choice(ends) if ends else found
        assert matcher.consume_tokens(found), matcher.get_error()
        ids += found
    raise AssertionError(f"no end of {ids[:200]}")


def read(form: ReplyFormat, name: str, text: str, size: int | None, schemas: Any) -> Any:
    """The content and calls of a reply that comes in pieces."""
    parser = ResponseParser(
        form.template,
        prompt=HEADS[name],
        schemas=schemas,
        names=schemas if form.only_known else None,
        waits=form.opens_thoughts,
    )
    size = size or max(1, len(text))
    found = Split("", "")
    for start in range(0, len(text), size):
        found += parser.feed(text[start : start + size])
    return found + parser.end(), parser.calls


class Schemas:
    """Random schemas of parameters."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def root(self) -> dict[str, Any]:
        rng = self._rng
        made = self._object(1, most=4)
        if rng.random() < 0.3:
            made["$defs"] = {"Point": self._object(2, most=2)}
            made["properties"]["at"] = {"$ref": "#/$defs/Point"}
        return made

    def _object(self, depth: int, most: int) -> dict[str, Any]:
        names = self._rng.sample(
            ["x", "y_2", "name", "long-key", "z.z"], self._rng.randint(0, most)
        )
        return {
            "type": "object",
            "properties": {name: self._value(depth + 1) for name in names},
            "required": [name for name in names if self._rng.random() < 0.6],
            "additionalProperties": False,
        }

    def _value(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        kinds = [
            "string",
            "string",
            "enum",
            "integer",
            "number",
            "boolean",
            "null",
            "any of",
            "types",
        ]
        kind = rng.choice(kinds + ["array", "object"] * (depth < 4))
        if kind == "object":
            return self._object(depth, most=2)
        if kind == "array":
            return {"type": "array", "items": self._value(depth + 1),
                    "minItems": rng.randint(0, 2), "maxItems": rng.randint(2, 3)}  # fmt: skip
        if kind == "string":
            return rng.choice([{"type": "string"}, {"type": "string", "minLength": 2},
                               {"type": "string", "minLength": 1, "maxLength": 3}])  # fmt: skip
        if kind == "integer":
            return rng.choice(
                [{"type": "integer"}, {"type": "integer", "minimum": 3, "maximum": 7}]
            )
        if kind == "number":
            return {"type": "number", "minimum": -1, "maximum": 2.5}
        if kind == "enum":
            return rng.choice([{"enum": ["a b", "null", "7"]}, {"enum": [1, 2.5, None]},
                               {"const": True}, {"type": "string", "enum": ["x", "{"]},
                               {"enum": ["one", 2]}, {"const": "</a>"},
                               {"type": ["integer", "string"], "enum": ["b", 3]}])  # fmt: skip
        if kind == "types":
            return {"type": rng.choice([["string", "null"], ["integer", "null"],
                                        ["boolean", "integer"]])}  # fmt: skip
        if kind == "any of":
            return {"anyOf": rng.choice([
                [{"type": "string", "enum": ["one", "two"]}, {"type": "null"}],
                [{"type": "integer"}, {"type": "array", "items": {"type": "boolean"}}],
                [{"type": "string", "maxLength": 4}, {"type": "integer"}],
            ])}  # fmt: skip
        return {"type": kind}


def writer(form: ReplyFormat, kind: str, *end_marks: str) -> ReplyWriter:
    assert form.style is not None
    special = TOKENIZERS[kind].special
    ends = {special[mark] for mark in end_marks if mark in special}
    return ReplyWriter(form.style, special, frozenset(ends))


def check_reading(name: str, form: ReplyFormat, text: str, tools: Any, rng: random.Random) -> Any:
    """What a text means: the same in pieces, with arguments that are valid."""
    split, calls = read(form, name, text, None, tools)
    assert read(form, name, text, rng.randint(1, 7), tools) == (split, calls), text
    for call in calls:
        arguments = json.loads(call.arguments)
        jsonschema.validate(arguments, tools[call.name], jsonschema.Draft202012Validator)
    assert split.reasoning == ""
    return split.content, [call.name for call in calls]


def tools_of(rng: random.Random) -> dict[str, dict[str, Any]]:
    schemas = Schemas(rng)
    names = rng.sample(["add", "ad", "get-it", "a.b"], 2)
    return {name: schemas.root() if rng.random() < 0.8 else {} for name in names}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", TEMPLATES)
class TestRoundTrip:
    @pytest.fixture(params=[range(5), pytest.param(range(5, 80), marks=pytest.mark.soak)])
    def seeds(self, request):
        return request.param

    def test_calls(self, name, kind, seeds):
        """At least one call, and nothing else."""
        form = find_format(TEMPLATES[name])
        for seed in seeds:
            rng = random.Random(f"{name} {seed}")
            tools, is_one = tools_of(rng), seed % 3 == 0
            text = random_text(kind, writer(form, kind).calls(tools, is_one=is_one), rng)
            content, calls = check_reading(name, form, text, tools, rng)
            assert content == "", text
            assert len(calls) == 1 if is_one else calls, text

    def test_text_and_calls(self, name, kind, seeds):
        """Text before calls that are whole, or text alone."""
        form = find_format(TEMPLATES[name])
        mark = form.style.mark if form.style else ""
        if not mark:
            return
        for seed in seeds:
            rng = random.Random(f"{name} {seed}")
            tools = tools_of(rng)
            text = random_text(kind, writer(form, kind).mixed(tools, None, is_one=False), rng)
            content, calls = check_reading(name, form, text, tools, rng)
            assert mark not in content, text
            assert bool(calls) == (mark in text), text

    def test_structured_content_or_calls(self, name, kind, seeds):
        form = find_format(TEMPLATES[name])
        if form.style is None or not form.style.mark:
            return
        choices = ["yes/no", '{"a": 1}']
        outputs = [
            {"json": {"type": "object", "required": ["x"], "properties": {"x": {"type": "null"}}}},
            {"regex": r"a/b|[0-9]{2,3}"},
            {"choice": choices},
        ]
        for seed in seeds:
            rng = random.Random(f"{name} {seed}")
            tools = tools_of(rng)
            grammar = writer(form, kind).mixed(tools, outputs[seed % 3], is_one=False)
            content, calls = check_reading(name, form, random_text(kind, grammar, rng), tools, rng)
            if calls:
                assert content == ""
            elif seed % 3 == 0:
                assert "x" in json.loads(content)
            elif seed % 3 == 1:
                assert re.fullmatch(r"a/b|[0-9]{2,3}", content)
            else:
                assert content in choices


def test_a_closing_mark_that_ends_the_output():
    """gpt-oss stops at `<|call|>`, so there is one call, and the mark is no part of it."""
    form, rng = find_format(TEMPLATES["gpt-oss"]), random.Random(0)
    tools = tools_of(rng)
    for _ in range(5):
        lark = writer(form, "special marks", "<|call|>").calls(tools, is_one=False)
        text = random_text("special marks", lark, rng)
        assert "<|call|>" not in text
        content, calls = check_reading("gpt-oss", form, text, tools, rng)
        assert (content, len(calls)) == ("", 1)


def test_content_of_gpt_oss_is_a_message():
    form, rng = find_format(TEMPLATES["gpt-oss"]), random.Random(0)
    for kind in TOKENIZERS:
        text = random_text(kind, writer(form, kind).content({"choice": ["yes", "no"]}), rng)
        assert "<|channel|>final<|message|>" in text
        assert read(form, "gpt-oss", text, None, None)[0].content in ("yes", "no")


@pytest.mark.parametrize(
    ("name", "schema", "message"),
    [
        ("qwen3", {"type": "array"}, "must have the type 'object', got 'array'"),
        ("qwen3", {"properties": {"x": {"type": "int"}}}, "parameters of the tool 'f' cannot be"),
        ("qwen3", {"properties": {"x": {"not": {}}}}, "parameters of the tool 'f' cannot be"),
        ("qwen3-coder", {"properties": {"x": {"type": "string", "pattern": "a"}}}, "pattern='a'"),
        ("qwen3-coder", {"additionalProperties": {"type": "integer"}}, "additionalProperties="),
        ("qwen3-coder", {"properties": {"a<b": {"type": "integer"}}}, "the name 'a<b'"),
        ("qwen3-coder", {"properties": {"x": {"type": "string", "enum": [1]}}}, "no value of the"),
        ("gemma4", {"properties": {"x": {"minimum": 3, "enum": [1, 4]}}}, "minimum=3"),
        ("gemma4", {"properties": {"x": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ("gemma4", {"properties": {"x": {"allOf": [{"type": "string"}, {}]}}}, "allOf of several"),
        ("gemma4", {"properties": {"x": {"type": "string", "pattern": "a"}}}, "pattern='a'"),
    ],
)
def test_what_has_no_grammar_is_refused(name, schema, message):
    form = find_format(TEMPLATES[name])
    with pytest.raises(InvalidRequestError, match=message):
        writer(form, "special marks").calls({"f": schema}, is_one=False)


def test_names_that_calls_cannot_hold():
    with pytest.raises(InvalidRequestError, match=r"letters, digits.*got 'a b'"):
        writer(find_format(TEMPLATES["qwen3"]), "special marks").calls({"a b": {}}, is_one=True)


def test_schemas_that_hold_themselves():
    """In Gemma's notation; the others write them as JSON."""
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    root = {"properties": {"node": {"$ref": "#/$defs/Node"}}, "$defs": {"Node": node}}
    root["additionalProperties"] = node["additionalProperties"] = False
    for name in ("gemma4", "qwen3", "qwen3-coder"):
        form, rng = find_format(TEMPLATES[name]), random.Random(1)
        text = random_text(
            "special marks", writer(form, "special marks").calls({"f": root}, is_one=True), rng
        )
        assert check_reading(name, form, text, {"f": root}, rng) == ("", ["f"])
