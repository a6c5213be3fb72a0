"""Writes grammars in llguidance's dialect of Lark.

`%json` is a JSON Schema, `<[5]>` a token, and a rule with `[lazy]` the shortest match.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from sgljax_engine import InvalidRequestError
from sgljax_engine.processing.vocabulary import (
    grammar_of,
    lark_choice,
    lark_json,
    load_llguidance,
)

_ESCAPED = re.compile(r"\\.|/", re.DOTALL)


class LarkWriter:
    """Collects rules. `special` has the ids of special tokens, which are no texts to a grammar."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        longest = sorted(special, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, longest)) or r"(?!)")
        self._names: dict[tuple[str, str], str] = {}  # by stem and body
        self._bodies: dict[str, str] = {}

    def text(self, text: str) -> str:
        """An expression for a text, with its special tokens as tokens."""
        found, end = [], 0
        for mark in self._marks.finditer(text):
            found += [json.dumps(text[end : mark.start()]), f"<[{self._special[mark[0]]}]>"]
            end = mark.end()
        found.append(json.dumps(text[end:]))
        return " ".join(each for each in found if each != '""') or '""'

    def free_text(self, without: Iterable[str], *, low: int = 0, high: int | None = None) -> str:
        """A terminal for texts that contain none of some marks, `low` to `high` characters long."""
        marks = [mark for mark in without if mark not in self._special]
        count = "*" if (low, high) == (0, None) else f"{{{low},{'' if high is None else high}}}"
        body = f"/(?s:.){count}/"
        if marks:
            inner = "|".join(re.escape(mark).replace("/", r"\/") for mark in marks)
            body += f" & ~/(?s:.*)({inner})(?s:.*)/"
        return self.rule("TEXT", body)

    def text_until(self, terminal: str, mark: str) -> str:
        """Text of a terminal up to a mark, and the mark."""
        if self._marks.match(mark):
            return f"{terminal} {self.text(mark)}"
        return self.rule("until", f"[lazy]: {terminal} {json.dumps(mark)}")

    def json(self, schema: Mapping[str, Any]) -> str:
        """A rule for JSON under a schema."""
        return self.rule("json", lark_json(schema))

    def content(self, outputs: Mapping[str, Any]) -> str:
        """An expression for checked `structured_outputs`.

        Raises:
            InvalidRequestError: for a grammar, which cannot stand inside of another.
        """
        (kind, value), *_ = outputs.items()
        if kind == "grammar":
            raise InvalidRequestError(
                "structured_outputs['grammar'] goes neither with tools nor with gpt-oss: it cannot "
                "stand inside of another grammar; use json, regex or choice"
            )
        if kind == "choice":
            return f"({lark_choice(value)})"
        if kind == "regex":
            check_outputs(outputs, "structured_outputs['regex']")
            found = _ESCAPED.sub(lambda part: r"\/" if part[0] == "/" else part[0], value)
            return self.rule("CONTENT", f"/{found}/")
        return self.json(value if kind == "json" else {"type": "object"})

    def rule(self, stem: str, body: str) -> str:
        """The name of a rule with this body; a stem in capitals makes a terminal."""
        if (stem, body) not in self._names:
            self._names[stem, body] = name = self.new_name(stem)
            self.define(name, body)
        return self._names[stem, body]

    def new_name(self, stem: str) -> str:
        """A name to `define`."""
        name = f"{stem}_{len(self._bodies)}"
        self._bodies[name] = ""
        return name

    def define(self, name: str, body: str) -> None:
        """Gives a rule its body, which may begin with options: `[lazy]: ...`."""
        self._bodies[name] = body if body.startswith("[lazy]:") else f": {body}"

    def grammar(self, start: str) -> str:
        """The whole grammar of a start expression."""
        rules = {"start": f": {start}", **self._bodies}
        return "".join(f"{name}{body}\n" for name, body in rules.items())


def check_outputs(outputs: Mapping[str, Any], name: str) -> None:
    """Raises InvalidRequestError for checked `structured_outputs` that llguidance refuses."""
    if problem := _problem(grammar_of(outputs)):
        raise InvalidRequestError(f"{name} cannot be followed: {problem}")


@functools.lru_cache(maxsize=64)  # clients send the same schemas again
def _problem(grammar: str) -> str:
    """Why llguidance refuses a grammar; empty if it does not."""
    matcher = load_llguidance().LLMatcher
    is_error, messages = matcher.validate_grammar_with_warnings(grammar)
    return messages[0].partition("\n")[0] if is_error else ""
