"""Llama 3.1's and 3.2's tool calls: bare JSON objects, with or without words around them."""

from __future__ import annotations

import re

from sgljax_engine.server.openai.calls import Call, JsonScanner, read_call
from sgljax_engine.server.openai.reasoning import held_back

_TAG = "<|python_tag|>"
_SEPARATORS = "; \n\r\t"
_KEY = re.compile(r'\{\s*"')
_START = re.compile(r"\{|<\|python_tag\|>")
_MAYBE_KEY = re.compile(r"\{\s*")


class LlamaParser:
    """Finds objects with a name and parameters, and drops the tag before them. See `ToolParser`.

    An object without parameters is a call only where nothing but calls stands before it.
    """

    def __init__(self) -> None:
        """Starts before the first text."""
        self.calls: list[Call] = []
        self._held = ""
        self._place = 0  # of what is not decided in `_held`
        self._scanner: JsonScanner | None = None  # of the object that begins there
        self._tag = ""  # the tag before it, with the space behind
        self._lead = ""  # space before the first word, which is no content before a call
        self._has_words = False
        self._is_after_call = False

    def feed(self, text: str) -> str:
        """Takes new text; returns what is certain to be content."""
        self._held += text
        return self._read(is_end=False)

    def end(self) -> str:
        """Returns what was held back and is no call."""
        content = self._read(is_end=True)
        content += self._words(self._tag + self._held[self._place :])
        content += "" if self.calls else self._lead
        self._tag = self._held = self._lead = ""
        return content

    def _read(self, *, is_end: bool) -> str:
        parts: list[str] = []
        while self._place < len(self._held):
            before = self._place, self._tag, self._scanner
            parts.append(self._step(is_end=is_end))
            if before == (self._place, self._tag, self._scanner):
                break  # more text must come
        if self._scanner is None:
            self._held, self._place = self._held[self._place :], 0
        return "".join(parts)

    def _step(self, *, is_end: bool) -> str:
        """Takes the next part of what is held, if it is decided."""
        held, place = self._held, self._place
        if self._scanner is not None:
            return self._step_in_object(self._scanner)
        if self._tag and held[place] != "{":
            if held[place].isspace():
                self._tag += held[place]
                self._place += 1
                return ""
            tag, self._tag = self._tag, ""  # of something else than a call
            return self._words(tag)
        if held.startswith(_TAG, place):
            self._tag = _TAG
            self._place += len(_TAG)
            return ""
        if held[place] == "{":
            if _KEY.match(held, place):
                self._scanner = JsonScanner(place)
                return ""
            if not is_end and _MAYBE_KEY.fullmatch(held, place):
                return ""
            return self._take(1)
        found = _START.search(held, place)
        if found is not None:
            return self._take(found.start() - place)
        kept = 0 if is_end else held_back(held[-len(_TAG) :], _TAG)
        return self._take(max(0, len(held) - place - kept))

    def _step_in_object(self, scanner: JsonScanner) -> str:
        scanner.scan(self._held)
        if scanner.end is None and not scanner.is_broken:
            return ""
        self._scanner = None
        if scanner.end is None:  # broken
            return self._take(scanner.position)
        text = self._held[self._place : self._place + scanner.end]
        call = read_call(text, "parameters")
        if call is None or (self._has_words and not self._tag and '"parameters"' not in text):
            return self._take(scanner.end)
        self.calls.append(call)
        self._place, self._tag = self._place + scanner.end, ""
        self._is_after_call = True
        return ""

    def _take(self, length: int) -> str:
        taken = self._held[self._place : self._place + length]
        self._place += length
        tag, self._tag = self._tag, ""
        return self._words(tag + taken)

    def _words(self, text: str) -> str:
        """Text that is no call, without what only separates it from one."""
        if self._is_after_call:
            text = text.lstrip(_SEPARATORS)
            self._is_after_call = not text
        if not self._has_words and not self.calls:
            text, self._lead = self._lead + text, ""
            if not text.strip():
                self._lead = text
                return ""
        self._has_words |= bool(text.strip())
        return text
