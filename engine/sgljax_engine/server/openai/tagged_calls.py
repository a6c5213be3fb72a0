"""Tool calls between `<tool_call>` and `</tool_call>`: Qwen 2.5's and 3's, and Qwen3-Coder's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

from sgljax_engine.server.openai.calls import Call, JsonScanner, read_call, read_json
from sgljax_engine.server.openai.reasoning import held_back

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Block(NamedTuple):
    """A block that has ended.

    Attributes:
        length: Characters behind the opening tag, the closing one included.
        call: The call in it; None if there is none.
    """

    length: int
    call: Call | None


class BlockReader(Protocol):
    """Reads what stands behind one opening tag."""

    ends_all: ClassVar[bool]
    """Whether no block behind one that does not end is a call."""

    def read(self, text: str) -> Block | None:
        """The block, once it has ended; `text` is all behind the tag, and grows between calls."""
        ...


class JsonBlock:
    """A block of JSON, after Hermes. A closing tag inside of a string is no end."""

    ends_all: ClassVar[bool] = False

    def __init__(self) -> None:
        """Starts before the first text."""
        self._start = 0
        self._scanner: JsonScanner | None = None

    def read(self, text: str) -> Block | None:
        """The block, once it has ended or cannot be a call."""
        if self._scanner is None:
            self._start = len(text) - len(text.lstrip())
            if self._start == len(text):
                return None
            if text[self._start] != "{":
                return _without_call(text, self._start)
            self._scanner = JsonScanner(self._start)
        start, scanner = self._start, self._scanner
        scanner.scan(text)
        if scanner.is_broken:
            return _without_call(text, start + scanner.position)
        if scanner.end is None:
            return None
        end = start + scanner.end
        rest = text[end:].lstrip()
        if rest.startswith(_CLOSE):
            length = len(text) - len(rest) + len(_CLOSE)
            return Block(length, read_call(text[start:end], "arguments"))
        return None if _CLOSE.startswith(rest) else _without_call(text, end)


class XmlBlock:
    """Qwen3-Coder's: `<function=name>` with a `<parameter=name>` for each argument.

    Values are bare text. The tool's schema says which of them are no strings.
    """

    ends_all: ClassVar[bool] = True  # no function ends there

    _FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>(.*)</function>\s*", re.DOTALL)
    _PARAMETER = re.compile(
        r"\s*<parameter=([^<>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|$))", re.DOTALL
    )

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """Starts before the first text.

        Args:
            schemas: Of the parameters of each tool.
        """
        self._schemas = schemas
        self._num_searched = 0
        self._has_function = False

    def read(self, text: str) -> Block | None:
        """The block, once it has ended. A closing tag counts where the function has ended."""
        while (place := text.find(_CLOSE, self._num_searched)) >= 0:
            self._num_searched = place + len(_CLOSE)
            if not self._has_function:
                self._has_function = text.find("<function=", 0, place) >= 0
            if not self._has_function:
                return Block(self._num_searched, None)
            end = place
            while text[end - 1].isspace():
                end -= 1
            if text.endswith("</function>", 0, end):
                return Block(self._num_searched, self._call(text[:place]))
        self._num_searched = max(self._num_searched, len(text) - len(_CLOSE) + 1)
        return None

    def _call(self, text: str) -> Call | None:
        found = self._FUNCTION.fullmatch(text)
        if found is None:
            return None
        name, rest = found[1].strip(), found[2].rstrip()
        schema = self._schemas.get(name, {}).get("properties")
        types = schema if isinstance(schema, Mapping) else {}
        arguments: dict[str, Any] = {}
        place = 0
        while place < len(rest):
            parameter = self._PARAMETER.match(rest, place)
            if parameter is None:
                return None
            key = parameter[1].strip()
            arguments[key] = _typed(parameter[2], types.get(key))
            place = parameter.end()
        return Call(name, json.dumps(arguments))


class TaggedParser:
    """Finds blocks between the tags; all else is content. See `ToolParser`."""

    def __init__(self, make_reader: Callable[[], BlockReader]) -> None:
        """Starts before the first text.

        Args:
            make_reader: Makes a reader of one block.
        """
        self.calls: list[Call] = []
        self._make_reader = make_reader
        self._reader: BlockReader | None = None  # of the open block
        self._held = ""  # of an open block: what stands behind the tag
        self._is_after_call = False

    def feed(self, text: str) -> str:
        """Takes new text; returns what is certain to be content."""
        self._held += text
        content = ""
        while True:
            if self._reader is None:
                content += self._until_block()
            if self._reader is None:
                return content
            block = self._reader.read(self._held)
            if block is None:
                return content
            content += self._end_block(block)

    def end(self) -> str:
        """Returns what was held back. A block that is not whole ends at the first closing tag."""
        content = ""
        while self._reader is not None:
            place = -1 if self._reader.ends_all else self._held.find(_CLOSE)
            if place < 0:
                self._reader, self._held = None, _OPEN + self._held
                self._is_after_call = False
                break
            content += self._end_block(Block(place + len(_CLOSE), None)) + self.feed("")
        held, self._held = self._held, ""
        return content + (held.lstrip() if self._is_after_call else held)

    def _until_block(self) -> str:
        """Takes the content before the next block, and opens it."""
        before, opened, after = self._held.partition(_OPEN)
        if opened:
            self._reader, self._held = self._make_reader(), after
        else:
            kept = held_back(before, _OPEN)
            self._held = before[len(before) - kept :]
            before = before[: len(before) - kept]
        if self._is_after_call:  # a line break between two calls is no content
            before = before.lstrip()
            self._is_after_call = not before
        return before

    def _end_block(self, block: Block) -> str:
        inner, self._held = self._held[: block.length], self._held[block.length :]
        self._reader = None
        self._is_after_call = block.call is not None
        if block.call is None:
            return _OPEN + inner
        self.calls.append(block.call)
        return ""


def _without_call(text: str, start: int) -> Block | None:
    """A block without a call, up to the next closing tag."""
    place = text.find(_CLOSE, start)
    return None if place < 0 else Block(place + len(_CLOSE), None)


def _typed(text: str, schema: Any) -> Any:
    """The value of an argument: a string where the schema says so or the text is no JSON."""
    text = text.removeprefix("\n").removesuffix("\n")
    kind = schema.get("type") if isinstance(schema, Mapping) else "string"
    if kind == "string":
        return text
    try:
        return read_json(text)
    except ValueError:
        return text
