"""Tool calls, and the JSON that they are written in."""

from __future__ import annotations

import json
import re
import uuid
from typing import Any, NamedTuple, NoReturn, Protocol


class Call(NamedTuple):
    """A call: the function's name, and its arguments as the JSON of an object."""

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


class JsonScanner:
    """Finds the end of a JSON object whose text comes in pieces.

    Quotes and brackets alone decide; whether it is JSON, `read_json` says.

    Attributes:
        end: Length of the object; None while it is open.
        is_broken: Whether it can be no JSON.
        position: Characters that were looked at.
    """

    _IN_STRING = re.compile(r'["\\]')
    _OUTSIDE = re.compile(r'["{}\[\]<]')

    def __init__(self, start: int = 0) -> None:
        """Starts before the object's first character, which must be its opening bracket.

        Args:
            start: Where it is in the text.
        """
        self._start = start
        self.end: int | None = None
        self.is_broken = False
        self.position = 0
        self._depth = 0
        self._is_in_string = False

    def scan(self, text: str) -> None:
        """Looks at more of the object; `text` has all of it so far."""
        length = len(text) - self._start
        while self.end is None and not self.is_broken and self.position < length:
            pattern = self._IN_STRING if self._is_in_string else self._OUTSIDE
            found = pattern.search(text, self._start + self.position)
            if found is None:
                self.position = length
                return
            mark, place = found[0], found.start() - self._start
            if mark == "\\":
                if place + 1 == length:  # what it escapes is still to come
                    self.position = place
                    return
                self.position = place + 2
                continue
            self.position = place + 1
            if mark == '"':
                self._is_in_string = not self._is_in_string
            elif mark == "<":  # the start of a tag: JSON has none outside of strings
                self.position, self.is_broken = place, True
            else:
                self._depth += 1 if mark in "{[" else -1
                if self._depth == 0:
                    self.end = self.position


def read_json(text: str) -> Any:
    """The value of a JSON text; line breaks inside of strings are allowed.

    Raises:
        ValueError: for anything that is not JSON, NaN included.
    """
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse_constant)
        json.dumps(value, allow_nan=False)  # 1e999 is read as infinity
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def read_call(text: str, arguments_name: str) -> Call | None:
    """The call that a JSON object means, or None.

    Args:
        text: JSON, or what a model wrote instead.
        arguments_name: Where the format has the arguments. Models confuse the two names.
    """
    try:
        value = read_json(text)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    names = (arguments_name, "arguments", "parameters")
    arguments = next((value[name] for name in names if name in value), None)
    if isinstance(arguments, str) and arguments.strip():  # JSON inside JSON
        try:
            arguments = read_json(arguments)
        except ValueError:
            return None
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    return Call(value["name"], json.dumps(arguments)) if isinstance(arguments, dict) else None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
