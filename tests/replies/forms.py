"""Generated replies of chat models, with what they mean: thoughts, content and calls.

No part of the engine is imported, so that another parser can read them too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import re
from collections.abc import Callable
from typing import Any

_WIDE = str.maketrans("| ", "\uff5c\u2581")


def deepseek(text: str) -> str:
    """A mark of DeepSeek's."""
    return text.translate(_WIDE)


def _tool(name: str, **properties: Any) -> Any:
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS: list[Any] = [
    _tool(
        "get_weather",
        city={"type": "string"},
        days={"type": "integer"},
        metric={"type": "boolean"},
        ratio={"type": "number"},
        note={"anyOf": [{"type": "string"}, {"type": "null"}]},
        either={"type": ["integer", "string"]},
        maybe={"type": "string", "nullable": True},
        place={"type": "object"},
        tags={"type": "array"},
    ),
    _tool("run-code", code={"type": "string"}),
    _tool("now"),
]
"""What every reply may call."""

_PROPERTIES: dict[str, Any] = {
    each["function"]["name"]: each["function"]["parameters"] for each in TOOLS
}
_PYTHON = re.compile(r"\n[\[{]['\"].*(True|False|None|').*[\]}]\n</parameter>")
_WORDS = (
    "yes",
    "The sum is {x}.",
    "\u5317\u4eac",
    "\U0001f327\ufe0f",
    "a\u0301",
    "3 < 4 > 2",
    "if (a) { return; }",
    '"quoted"',
    "it's",
    "\\n \\\\",
    "```json\n[1]\n```",
    "</",
    "<t",
    "[TOOL",
    "|>",
    "\n",
    "\n\n",
    "\u2028",
    "tool_call",
    "<b>bold</b>",
)


@dataclasses.dataclass(frozen=True)
class Form:
    """How a model writes.

    Attributes:
        template: A part of its chat template, with what the format is known by.
        head: What a prompt ends with.
        think: Marks of thoughts; None without any.
        close: The mark that ends a call.
        call: Writes one call.
        calls: Joins several.
        opens: Whether prompts may open or close the thoughts.
        final: What stands before the content.
        junk: What looks like a call and is none.
    """

    template: str
    head: str
    think: tuple[str, str] | None = None
    close: str = ""
    call: Callable[[str, dict[str, Any], random.Random], str] | None = None
    calls: tuple[str, str, str] = ("", "\n", "")
    opens: bool = False
    final: str = ""
    junk: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Reply:
    """A reply and its meaning.

    Attributes:
        prompt: What stands before it.
        text: What the model wrote.
        reasoning: The thoughts.
        content: The content.
        calls: Names and arguments.
        is_cut: Whether it ends before its end: then the meaning is the whole one's.
        traits: What is unusual about it.
        is_xml: Whether arguments are tags.
        num_complete: Calls whose text it has whole.
    """

    prompt: str
    text: str
    reasoning: str
    content: str
    calls: tuple[tuple[str, dict[str, Any]], ...]
    is_cut: bool
    traits: frozenset[str]
    is_xml: bool
    num_complete: int


def _json(value: Any, rng: random.Random) -> str:
    is_ascii, indent = rng.random() < 0.3, rng.choice([None, None, 2])
    return json.dumps(value, ensure_ascii=is_ascii, indent=indent)


def _json_call(name: str, arguments: dict[str, Any], rng: random.Random) -> str:
    inner = _json({"name": name, "arguments": arguments}, rng)
    space = rng.choice(["\n", "", " "])
    return f"<tool_call>{space}{inner}{space}</tool_call>"


def _llama_call(name: str, arguments: dict[str, Any], rng: random.Random) -> str:
    tag = rng.choice(["", "", "<|python_tag|>"])
    return tag + _json({"name": name, "parameters": arguments}, rng)


def _xml_text(value: Any, rng: random.Random) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (bool, type(None))) and rng.random() < 0.5:
        return str(value)
    if isinstance(value, (dict, list)) and rng.random() < 0.5:
        return repr(value)
    return json.dumps(value, ensure_ascii=False)


def _xml_call(name: str, arguments: dict[str, Any], rng: random.Random) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{_xml_text(value, rng)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def _untidy(written: str, rng: random.Random) -> str:
    """XML calls as models write them too."""
    kind = rng.randrange(4)
    if kind == 0:  # no tags around the functions
        return written.replace("<tool_call>\n", "").replace("\n</tool_call>", "")
    if kind == 1:  # several functions in a block
        return written.replace("</function>\n</tool_call>\n<tool_call>\n", "</function>\n")
    if kind == 2:  # an argument does not end
        return written.replace("\n</parameter>\n<parameter=", "\n<parameter=", 1)
    return written.removesuffix("\n</tool_call>")


def _gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma_value(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma_value, value)) + "]"
    return json.dumps(value)


def _gemma_call(name: str, arguments: dict[str, Any], rng: random.Random) -> str:
    return f"<|tool_call>call:{name}{_gemma_value(arguments)}<tool_call|>"


def _mistral_call(name: str, arguments: dict[str, Any], rng: random.Random) -> str:
    return _json({"name": name, "arguments": arguments, "id": "abcdefghi"}, rng)


def _args_call(name: str, arguments: dict[str, Any], rng: random.Random) -> str:
    number = rng.choice(["", "[CALL_ID]abcdefghi"])
    return f"[TOOL_CALLS]{name}{number}[ARGS]{_json(arguments, rng)}"


def _deepseek_call(name: str, arguments: dict[str, Any], rng: random.Random) -> str:
    begin, sep, end = map(deepseek, ("<|tool call begin|>", "<|tool sep|>", "<|tool call end|>"))
    inner = _json(arguments, rng)
    if rng.random() < 0.5:
        return f"{begin}function{sep}{name}\n```json\n{inner}\n```{end}"
    return f"{begin}{name}{sep}{inner}{end}"


def _harmony_call(name: str, arguments: dict[str, Any], rng: random.Random) -> str:
    to = f"to=functions.{name}"
    header = rng.choice(
        [
            f"<|channel|>commentary {to} <|constrain|>json",
            f" {to}<|channel|>commentary <|constrain|>json",
            f"<|channel|>commentary {to}",
        ]
    )
    return f"<|start|>assistant{header}<|message|>{_json(arguments, rng)}<|call|>"


_CHATML = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
_THINK = ("<think>", "</think>")
_JUNK = tuple(
    f"<tool_call>{each}</tool_call>"
    for each in (
        "{broken",
        "[1]",
        "hello",
        '{"name": 1}',
        '{"name": "f", "arguments": 3}',
        "{}}",
        "",
    )
)
_JSON: dict[str, Any] = {
    "head": _CHATML,
    "close": "</tool_call>",
    "call": _json_call,
    "junk": _JUNK,
}
_XML: dict[str, Any] = {
    **_JSON,
    "call": _xml_call,
    "junk": (
        "use <function=f> to call",
        "<tool_call>hello</tool_call>",
        "<function=",
        "</function>",
    ),
}
_FINAL = "<|start|>assistant<|channel|>final<|message|>"
FORMS: dict[str, Form] = {
    "qwen2.5": Form(template="<tool_call>", **_JSON),
    "qwen3": Form(template="<tool_call> </think>", think=_THINK, opens=True, **_JSON),
    "qwen3-coder": Form(template="<tool_call> <function=", **_XML),
    "qwen3.5": Form(
        template="<tool_call> <function= </think> add_generation_prompt <think>",
        think=_THINK,
        opens=True,
        **_XML,
    ),
    "llama3": Form(
        template="<|python_tag|>",
        head="<|start_header_id|>assistant<|end_header_id|>\n\n",
        call=_llama_call,
        calls=("", "; ", ""),
        junk=('{"name": "Bob"}', "<|python_tag|>print(1)", '{"name": 1}', '{"x": "<"}'),
    ),
    "gemma3": Form(template="<start_of_turn>", head="<start_of_turn>model\n"),
    "gemma4": Form(
        template="<|turn> <|channel>",
        head="<|turn>model\n",
        think=("<|channel>thought\n", "<channel|>"),
        close="<tool_call|>",
        junk=("<|tool_call>call:f{<tool_call|>", "<|tool_call>call:f no<tool_call|>"),
        call=_gemma_call,
        calls=("", "", ""),
    ),
    "mistral": Form(
        template="[INST] [TOOL_CALLS]",
        head="[INST] hi[/INST]",
        call=_mistral_call,
        calls=("[TOOL_CALLS] [", ", ", "]"),
    ),
    "mistral-args": Form(
        template="[INST] [TOOL_CALLS] [ARGS] [THINK]",
        head="[INST] hi[/INST]",
        think=("[THINK]", "[/THINK]"),
        call=_args_call,
        calls=("", "", ""),
    ),
    "deepseek": Form(
        template=deepseek("<|Assistant|> <|tool call begin|> ")
        + "</think> add_generation_prompt <think>",
        head=deepseek("<|User|>") + "hi" + deepseek("<|Assistant|>"),
        think=_THINK,
        close=deepseek("<|tool call end|>"),
        call=_deepseek_call,
        calls=(deepseek("<|tool calls begin|>"), "\n", deepseek("<|tool calls end|>")),
        opens=True,
    ),
    "gpt-oss": Form(
        template="<|channel|> <|message|>",
        head="<|start|>user<|message|>hi<|end|><|start|>assistant",
        think=("<|channel|>analysis<|message|>", "<|end|>"),
        close="<|call|>",
        call=_harmony_call,
        calls=("", "", ""),
        final=_FINAL,
    ),
}
"""Formats of replies by their models."""


def make_reply(name: str, seed: int) -> Reply:
    """The reply of a format with a number."""
    return _Maker(FORMS[name], random.Random(f"{name} {seed}")).make()


class _Maker:
    def __init__(self, form: Form, rng: random.Random) -> None:
        self._form, self._rng = form, rng
        self._traits: set[str] = set()

    def make(self) -> Reply:
        rng, form = self._rng, self._form
        prompt, opening, thoughts = self._thoughts()
        is_open = "unclosed thoughts" in self._traits
        before = self._words() if rng.random() < 0.7 else ""
        if form.junk and rng.random() < 0.15:
            before += rng.choice(form.junk) + " "
            self._traits.add("no call")
        calls, written = self._calls()
        if is_open:
            before = ""
        content = before
        if not calls and not content.strip() and not is_open:
            content = before = "yes"
        text = opening + form.final * bool(before) + before
        if before and form.final:
            text += "<|end|>" if calls or rng.random() < 0.5 else ""
        text += written
        if calls and not form.final and not is_open and rng.random() < 0.1:
            content += "Done."
            text += rng.choice(["", "\n", " "]) + "Done."
            self._traits.add("text behind calls")
        elif calls and form.close and rng.random() < 0.1 and text.endswith(form.close):
            text = text.removesuffix(form.close)  # as with stop="</tool_call>"
            self._traits.add("no closing mark")
        is_cut = rng.random() < 0.25
        if is_cut:
            text = text[: rng.randrange(len(text) + 1)]
            self._traits.add("cut")
        num_complete = len(calls)
        if is_cut:  # an end of calls may stand in their strings, or in words
            ends = [] if self._is_unusual() or not form.close else text.split(form.close)[1:]
            num_complete = min(len(ends), len(calls))
        return Reply(
            prompt,
            text,
            thoughts,
            content,
            tuple(calls),
            is_cut,
            frozenset(self._traits),
            form.call is _xml_call,
            num_complete,
        )

    def _is_unusual(self) -> bool:
        unusual = {"a mark in a string", "no call", "untidy XML", "unclosed thoughts"}
        return not unusual.isdisjoint(self._traits)

    def _thoughts(self) -> tuple[str, str, str]:
        """The prompt, what the model writes of its thoughts, and the thoughts."""
        rng, form = self._rng, self._form
        if form.think is None or rng.random() < 0.3:
            return form.head, "", ""
        first, last = form.think
        thoughts = self._words(form.think).strip() or "hm"
        kinds = ["model"]
        if form.opens:
            kinds += ["model", "prompt", "closed", "again", "unclosed"]
            kinds += ["bare"] * ("add_generation_prompt" in form.template)
        kind = rng.choice(kinds)
        inner = rng.choice(["", "\n"]) + thoughts + rng.choice(["", "\n"])
        behind = rng.choice(["", "\n\n"]) if not form.final else ""
        if kind == "closed":
            return f"{form.head}{first}\n\n{last}\n\n", "", ""
        if kind == "prompt":
            return f"{form.head}{first}\n", f"{inner}{last}{behind}", thoughts
        if kind == "unclosed":
            self._traits.add("unclosed thoughts")
            return f"{form.head}{first}\n", inner, thoughts
        if kind == "bare":
            self._traits.add("thoughts without a mark")
            return form.head, f"{inner}{last}{behind}", thoughts
        if kind == "again":
            self._traits.add("a repeated mark")
            return f"{form.head}{first}\n", f"{first}{inner}{last}{behind}", thoughts
        return form.head, f"{first}{inner}{last}{behind}", thoughts

    def _words(self, marks: tuple[str, ...] = ()) -> str:
        rng = self._rng
        found = "".join(
            rng.choice(_WORDS) + rng.choice([" ", " ", "", "\n"])
            for _ in range(rng.randrange(1, 12))
        )
        return found.replace("[TOOL", "") if "[TOOL_CALLS]" in self._form.template else found

    def _calls(self) -> tuple[list[tuple[str, dict[str, Any]]], str]:
        rng, form = self._rng, self._form
        if form.call is None or rng.random() < 0.25:
            return [], ""
        calls = [self._call() for _ in range(rng.choice([1, 1, 1, 2, 3]))]
        if len(calls) > 1 and not form.close and not form.calls[2]:
            self._traits.add("JSON without a closing mark")
        first, between, last = form.calls
        written = first + between.join(form.call(*call, rng) for call in calls) + last
        if form.call is _xml_call and _PYTHON.search(written):
            self._traits.add("a Python value")
        if (
            form.call is _xml_call
            and rng.random() < 0.3
            and "a mark in a string" not in self._traits
        ):
            written = _untidy(written, rng)
            self._traits.add("untidy XML")
        return calls, written

    def _call(self) -> tuple[str, dict[str, Any]]:
        rng = self._rng
        name = rng.choice([*_PROPERTIES])
        properties = _PROPERTIES[name]["properties"]
        keys = [key for key in properties if rng.random() < 0.5]
        return name, {key: self._value(properties[key]) for key in keys}

    def _value(self, schema: Any) -> Any:
        rng = self._rng
        kind = schema.get("type", "string")
        if kind == "integer":
            return rng.choice([0, 7, -12, 10**12])
        if kind == "number":
            return rng.choice([0.5, 3, -1e-3])
        if kind == "boolean":
            return rng.random() < 0.5
        if kind == "object":
            return {"k": [1, True, None, {"d": self._string()}], "e": {}}
        if kind == "array":
            return [self._string(), 2, False]
        if kind == ["integer", "string"]:
            value = rng.choice(["12345", "x"])
            if value == "12345":
                self._traits.add("a string in a union")
            return value
        if schema.get("anyOf") or schema.get("nullable"):
            return rng.choice([None, "12345", "word"])
        return self._string()

    def _string(self) -> str:
        rng, form = self._rng, self._form
        if form.close and rng.random() < 0.1:
            self._traits.add("a mark in a string")
            return f"a {form.close} b"
        return self._words().strip()


NUM_REPLIES = 10_000
"""Replies of each format, in tests and goldens."""


def normal_form(reasoning: str, content: str, calls: Any) -> str:
    """A meaning as text: without the space around texts, which parsers differ in."""
    named = [[name, arguments] for name, arguments in calls]
    return json.dumps([reasoning.strip(), content.strip(), named], sort_keys=True)


def digest(form: str) -> int:
    """A number from 1 to 65,535 for a meaning."""
    return 1 + int.from_bytes(hashlib.sha256(form.encode()).digest()[:4], "big") % 0xFFFF
