"""Finds tool calls in what a model says: a registry of formats, by what the chat template writes.

Constrained decoding is not implemented, so a model may write a call that is none: such text stays
content.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from sgljax_engine.server.openai.reasoning import held_back


class Call(NamedTuple):
    """A call: the function's name, and its arguments as JSON."""

    name: str
    arguments: str

    def to_dict(self, index: int) -> dict[str, Any]:
        """OpenAI's tool call, with a fresh id."""
        return {
            "index": index,
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class ToolParser(Protocol):
    """Takes the text of one output, and gives back what is content. One output a parser.

    Attributes:
        calls: The calls found so far.
    """

    calls: list[Call]

    def feed(self, text: str) -> str:
        """Takes new text; returns what is certain to be content."""
        ...

    def end(self) -> str:
        """Returns what was held back and is no call."""
        ...


class QwenParser:
    """Qwen 2.5's and 3's, after Hermes: JSON between `<tool_call>` and `</tool_call>`."""

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        """Before the first text."""
        self.calls: list[Call] = []
        self._held = ""
        self._is_after_call = False

    def feed(self, text: str) -> str:
        """See `ToolParser`."""
        self._held += text
        content = ""
        while True:
            before, opened, after = self._held.partition(self._OPEN)
            ready = before if opened else before[: len(before) - held_back(before, self._OPEN)]
            if self._is_after_call:  # a line break between two calls is no content
                ready = ready.lstrip()
                if not ready and not opened:
                    return content
                self._is_after_call = not ready
            content += ready
            if not opened:
                self._held = self._held[len(self._held) - held_back(self._held, self._OPEN) :]
                return content
            inner, closed, rest = after.partition(self._CLOSE)
            if not closed:
                self._held = opened + after
                return content
            call = _read_call(inner, "arguments")
            if call is None:
                content += opened + inner + closed
            else:
                self.calls.append(call)
            self._is_after_call = call is not None
            self._held = rest

    def end(self) -> str:
        """See `ToolParser`."""
        held, self._held = self._held, ""
        return held.lstrip() if self._is_after_call else held


class LlamaParser:
    """Llama 3.1's and 3.2's: the whole output is JSON, or several objects between semicolons."""

    _TAG = "<|python_tag|>"

    def __init__(self) -> None:
        """Before the first text."""
        self.calls: list[Call] = []
        self._held = ""
        self._is_content = False

    def feed(self, text: str) -> str:
        """See `ToolParser`."""
        if self._is_content:
            return text
        self._held += text
        start = self._held.lstrip()
        if start.startswith(("{", self._TAG)) or self._TAG.startswith(start):
            return ""
        self._is_content = True
        held, self._held = self._held, ""
        return held

    def end(self) -> str:
        """See `ToolParser`."""
        held, self._held = self._held, ""
        rest = held.strip().removeprefix(self._TAG)
        calls: list[Call] = []
        while rest:
            try:
                _, length = json.JSONDecoder().raw_decode(rest)
            except (ValueError, RecursionError):
                return held
            call = _read_call(rest[:length], "parameters")
            if call is None:
                return held
            calls.append(call)
            rest = rest[length:].lstrip("; \n")
        self.calls = calls
        return ""


class ToolFormat(NamedTuple):
    """A format of tool calls.

    Attributes:
        is_used_by: Whether a chat template asks for this format.
        make_parser: A parser of one output.
    """

    is_used_by: Callable[[str], bool]
    make_parser: Callable[[], ToolParser]


TOOL_FORMATS: dict[str, ToolFormat] = {
    "qwen": ToolFormat(lambda template: "<tool_call>" in template, QwenParser),
    "llama": ToolFormat(
        lambda template: "<|python_tag|>" in template or '"parameters":' in template, LlamaParser
    ),
}
"""Formats by name; the first that a template uses is taken. Add one with a line here."""


def find_format(template: str | None) -> ToolFormat | None:
    """The format that a chat template asks for."""
    formats = TOOL_FORMATS.values()
    return next((each for each in formats if template and each.is_used_by(template)), None)


def _read_call(text: str, arguments_name: str) -> Call | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    names = (arguments_name, "arguments", "parameters")
    arguments = next((value[name] for name in names if name in value), {})
    if isinstance(arguments, str):  # JSON inside JSON
        return Call(value["name"], arguments)
    if not isinstance(arguments, dict):
        return None
    return Call(value["name"], json.dumps(arguments))
