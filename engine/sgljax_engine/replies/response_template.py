"""Response templates: the declarative form in which transformers describes replies of chat models.

A template names fields (thoughts, content, tool calls), the marks around each and the form of what
stands between them; transformers' docs page "Response Parsing" defines it. transformers reads it
with `utils.chat_parsing.ResponseParser`, from 5.13 on. Those versions need safetensors >= 0.8,
which google-tunix 0.1.7 forbids: 5.12.1 is the newest that installs beside Tunix. So
`parser.py` reads the same templates; tests compare the two.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import regex

from sgljax_engine import InvalidConfigError

MAX_MARK = 256
"""Characters of a mark: a pattern that needs more is not found."""

REASONING, CONTENT, CALLS = "reasoning_content", "content", "tool_calls"
_NAMES = {"thinking": REASONING, "reasoning": REASONING, **{n: n for n in (REASONING, CONTENT)}}
_FIELD_KEYS = frozenset(
    [
        "open",
        "open_pattern",
        "close",
        "close_pattern",
        "content",
        "content_args",
        "repeats",
        "join",
        "optional",
        "transform",
        "transform_each",
    ]
)
_TOKEN = regex.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", regex.DOTALL)
_SPACE = regex.compile(r"^(?:\\[sn][*?])+")
_OTHER_TEXT = "\0 \n0Zz"
"""Characters of many kinds: what may begin with each of them may begin with anything."""
_MAX_STARTS = 16
"""Literal texts that are looked for longer ones for."""
_ARGS = frozenset(
    {"strip", "unquoted_keys", "string_delims", "allow_non_json", "tag_pattern", "value_parser"}
)
_FORMS = ("text", "json", "xml-inline")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
    """What opens or closes a field: a pattern, whose matches begin with one of `starts`.

    `growing` matches, with `partial=True`, where later text may change the match; None where the
    mark is one of `starts`, and none of them begins with another.
    """

    starts: tuple[str, ...]
    pattern: regex.Pattern[str]
    growing: regex.Pattern[str] | None

    def match(self, text: str, start: int, *, is_end: bool) -> regex.Match[str] | bool | None:
        """The match at a place; None without one, and True while later text decides."""
        if not is_end and len(text) <= start + MAX_MARK:
            found = (self.growing or self.pattern).match(text, start, partial=True)
            if found and (found.partial or self.growing):
                return True
        return self.pattern.match(text, start, start + MAX_MARK)

    def may_go_on(self, text: str, start: int) -> bool:
        """Whether the text behind a place is the beginning of such a mark."""
        rest = text[start:].strip() if len(text) <= start + MAX_MARK else text
        return any(each.startswith(rest) for each in self.starts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """A field of a template; `open` is None for the text outside of all others.

    Where arguments are XML, `tags` stand behind its opening mark, and an argument ends with
    `tag_end`.
    """

    name: str
    open: Mark | None
    close: Mark | None
    form: str
    args: Mapping[str, Any]
    transform: Any
    each: bool
    tags: Mark | None
    tag_end: str

    @property
    def marks(self) -> str:
        marks = [mark.pattern.pattern for mark in (self.open, self.close) if mark is not None]
        return "".join([*marks, json.dumps(dict(self.args), ensure_ascii=False)]).replace("\\", "")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)  # equal to itself alone
class ResponseTemplate:
    """A template that was checked. `anchor` is where an assistant's message starts in a prompt."""

    anchor: regex.Pattern[str]
    fields: Mapping[str, Field]

    def message_start(self, prompt: str) -> str:
        """The part of the answer that the prompt has; empty where no message starts."""
        end = None
        for found in self.anchor.finditer(prompt):
            end = found.end()
        return "" if end is None else prompt[end:]


def load_template(given: Any) -> ResponseTemplate:
    """Checks a template, and compiles its patterns."""
    try:
        known = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
        _check(isinstance(given, Mapping) and given.keys() <= known, f"has keys beside {known}")
        _check(given.get("version", 1) == 1, f"has version {given.get('version')}, not 1")
        fields = [_field(name, field) for name, field in given["fields"].items()]
        names = [field.name for field in fields]
        _check(len(set(names)) == len(names), f"has two fields of one kind: {names}")
        return ResponseTemplate(anchor=_anchor(given), fields=dict(zip(names, fields, strict=True)))
    except (KeyError, TypeError, AttributeError, ValueError, regex.error) as error:
        raise InvalidConfigError(f"response_template cannot be used: {error}") from error


def _check(is_right: bool, what: str) -> None:
    if not is_right:
        raise ValueError(what)


def _field(name: str, given: Mapping[str, Any]) -> Field:
    _check(given.keys() <= _FIELD_KEYS, f"field {name!r} has keys beside {sorted(_FIELD_KEYS)}")
    form = given.get("content", "text")
    _check(form in _FORMS, f"field {name!r} has content={form!r}, not one of {_FORMS}")
    kind = CALLS if name == CALLS else _NAMES.get(name)
    _check(kind is not None, f"field {name!r} is none of {[*_NAMES, CALLS]}")
    _check((kind == CALLS) != (form == "text"), f"field {name!r} has content={form!r}")
    opening = _mark(given, "open")
    _check(opening is not None or kind == CONTENT, f"field {name!r} has no open")
    _check(not given.get("join"), f"field {name!r} has join={given.get('join')!r}")
    args = dict(given.get("content_args", {}))
    args["string_delims"] = tuple(map(tuple, args.get("string_delims", ())))
    _check(args.keys() <= _ARGS, f"field {name!r} has content_args beside {sorted(_ARGS)}")
    inner = args.get("value_parser", {}).get("name", "text")
    _check(inner in ("text", "json"), f"field {name!r} has value_parser {inner!r}")
    tags = args["tag_pattern"] if form == "xml-inline" else ""
    end, closing = regex.search(r"</\w+>", tags), _mark(given, "close")
    return Field(
        name=str(kind),
        open=opening,
        close=closing,
        form=form,
        args=args,
        transform=given.get("transform"),
        each=given.get("transform_each", False),
        tags=_tags(tags, closing) if tags else None,
        tag_end=end[0] if end else "",
    )


def _tags(pattern: str, closing: Mark | None) -> Mark:
    ends = () if closing is None else closing.starts
    return literal_mark(list(dict.fromkeys([*starts_of(_SPACE.sub("", pattern)), *ends])))


def _anchor(given: Mapping[str, Any]) -> regex.Pattern[str]:
    pattern = given.get("start_anchor_pattern")
    if pattern is not None:
        return regex.compile(pattern, regex.DOTALL)
    texts = given["start_anchor"]
    return literal_mark([texts] if isinstance(texts, str) else texts).pattern


def _mark(given: Mapping[str, Any], key: str) -> Mark | None:
    literal, pattern = given.get(key), given.get(f"{key}_pattern")
    if literal is not None:
        return literal_mark([literal] if isinstance(literal, str) else literal)
    if pattern is None:
        return None
    # Space before a mark is the parser's business, and would make each search quadratic.
    pattern = "|".join(_SPACE.sub("", part) for part in _alternatives(pattern))
    starts = starts_of(pattern)
    if list(map(regex.escape, starts)) == [pattern]:
        return literal_mark(starts)
    return Mark(
        starts=tuple(dict.fromkeys(starts)),
        pattern=regex.compile(pattern, regex.DOTALL),
        growing=regex.compile(f"(?:{pattern})\0", regex.DOTALL),  # never matches whole
    )


def literal_mark(texts: list[str]) -> Mark:
    _check(bool(texts) and all(texts), f"a mark is empty in {texts}")
    pattern = "|".join(regex.escape(text) for text in sorted(texts, key=len, reverse=True))
    may_grow = any(a != b and a.startswith(b) for a in texts for b in texts)
    growing = regex.compile(f"(?:{pattern})\0") if may_grow else None
    return Mark(starts=tuple(texts), pattern=regex.compile(pattern), growing=growing)


def starts_of(pattern: str) -> list[str]:
    """The literal texts that a pattern's matches begin with."""
    compiled = regex.compile(pattern, regex.DOTALL)
    letters = sorted({*pattern, *_OTHER_TEXT})

    def grown(start: str) -> list[str]:
        more = [a for a in letters if compiled.match(start + a, partial=True)]
        is_all = compiled.match(start) or not set(_OTHER_TEXT).isdisjoint(more)
        return [start] if is_all else [start + letter for letter in more]

    starts: list[str] = []
    longer = [""]
    while longer != starts and len(longer) <= _MAX_STARTS:
        starts, longer = longer, [text for start in longer for text in grown(start)]
    _check(bool(starts) and all(starts), f"{pattern!r} has no literal start")
    return starts


def _alternatives(pattern: str) -> list[str]:
    """A pattern's alternatives, outside of groups."""
    parts, depth = [""], 0
    for token in _TOKEN.findall(pattern):
        depth += (token == "(") - (token == ")")
        if token == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += token
    return parts
