"""Values in replies of models: the forms that response templates name, and types by JSON schema."""

from __future__ import annotations

import ast
import functools
import json
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import regex

from sgljax_engine.replies.response_template import MAX_MARK, Field

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's parameters, by the tool's name."""

_LIMIT_S = 1.0
"""Seconds for the tag pattern of a folder's own template."""
_KEY = regex.compile(r'"(?:\\.|[^"\\])*+"|(?<=[{,])\s*+(?P<key>[\w.-]++)(?=\s*+:)', regex.DOTALL)


class Call(NamedTuple):
    """A call: the function's name, and its arguments as the JSON of an object."""

    name: str
    arguments: str

    def to_dict(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):  # 1e999, NaN
        raise ValueError(f"{text} is no JSON")
    return value


_DECODER = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=_finite)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def read_json(text: str) -> Any:
    """The value of a JSON text; line breaks inside of strings are allowed."""
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class JsonEnd:
    """Finds the end of a JSON object or list whose text comes in pieces, if it can be JSON.

    Quotes, `delims` and brackets alone decide; whether it is JSON, `read_json` says. The text was
    looked at up to `position`.
    """

    def __init__(self, start: int, delims: tuple[tuple[str, str], ...] = ()) -> None:
        self.end: int | None = None
        self.is_broken = False
        self.position = start
        self._depth = 0
        self._marks = _json_marks(delims)
        self._next = self._marks.first

    def scan(self, text: str) -> None:
        """Looks at more of it; `text` has all of it so far."""
        first, outside, strings, beginnings = self._marks
        while self.end is None and not self.is_broken:
            found = self._next.search(text, self.position, partial=True)
            self.position = len(text) if found is None else found.start()
            if found is None or found.partial:
                return
            mark = found[0]
            if self._next is not first and self._next is not outside:  # in a string
                self._next = self._next if mark[0] == "\\" else outside
            elif mark in "{[":
                self._next, self._depth = outside, self._depth + 1
            elif self._next is first or mark in "<\\":  # JSON has neither outside of strings
                self.is_broken = text[self.position : self.position + MAX_MARK] not in beginnings
                return
            elif mark in "}]":
                self._depth -= 1
                self.end = found.end() if self._depth == 0 else None
            else:
                self._next = strings.get(mark, outside)  # a whole string, mostly
            self.position = found.end()


class _JsonMarks(NamedTuple):
    """What to look for at the start, outside of strings, and in the string that a mark opens.

    `beginnings` has unfinished opening marks.
    """

    first: regex.Pattern[str]
    outside: regex.Pattern[str]
    strings: Mapping[str, regex.Pattern[str]]
    beginnings: frozenset[str]


@functools.cache
def _json_marks(delims: tuple[tuple[str, str], ...]) -> _JsonMarks:
    strings = {a: regex.compile(regex.escape(b)) for a, b in delims}
    openings = "|".join(map(regex.escape, [*strings, '"']))
    return _JsonMarks(
        regex.compile(r"\S"),
        regex.compile(r'"(?:[^"\\]++|\\.)*+"|' + openings + r"|[{}\[\]<\\]", regex.DOTALL),
        {'"': regex.compile(r'\\.|"', regex.DOTALL), **strings},
        frozenset(a[:size] for a in strings for size in range(1, len(a))),
    )


_compile = functools.cache(regex.compile)


def read_calls(
    field: Field, text: str, captures: Mapping[str, str], schemas: Schemas
) -> list[Call]:
    """The calls that a field's text between its marks means; empty where it is no call."""
    try:
        value = _FORMS[field.form](text, field.args)
        values = value if isinstance(value, list) else [value]
        if field.transform is not None and field.each:
            values = [_transformed(field.transform, {**captures, **item}) for item in values]
        elif field.transform is not None:
            values = [_transformed(field.transform, {**captures, "content": value})]
        return [_call(each, schemas) for each in values]
    except (ValueError, TypeError, KeyError, RecursionError, TimeoutError):
        return []


def _call(value: Any, schemas: Schemas) -> Call:
    value = value.get("function", value) if isinstance(value, dict) else {}
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name.strip():
        raise ValueError("there is no name")
    # Models confuse the two names.
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str) and arguments.strip():  # JSON inside JSON
        arguments = read_json(arguments)
    if arguments is None or isinstance(arguments, str):
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError("arguments are no object")
    schema = schemas.get(name.strip(), {})
    properties = schema.get("properties")
    if isinstance(properties, dict):
        arguments = {
            key: _cast(given, types_of(properties.get(key), definitions_of(schema)))
            for key, given in arguments.items()
        }
    text = _ENCODER.encode(arguments)
    if not text.isascii() and regex.search(r"[\ud800-\udfff]", text):  # no UTF-8 has these
        text = json.dumps(arguments)
    return Call(name.strip(), text)


TYPE_NAMES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}
"""JSON Schema's names of types."""


def definitions_of(schema: Mapping[str, Any]) -> Any:
    """What `$ref` of a schema may name."""
    return schema.get("$defs", schema.get("definitions", {}))


def types_of(schema: Any, definitions: Any) -> list[str]:
    """The types that a schema allows; empty where it does not say."""
    if not isinstance(schema, dict):
        return []
    found, given = [], schema.get("type")
    if isinstance(schema.get("$ref"), str) and isinstance(definitions, dict):
        name = schema["$ref"].rpartition("/")[2]
        others = {key: each for key, each in definitions.items() if key != name}
        found += types_of(definitions.get(name), others)
    if given is None:
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        given = [TYPE_NAMES[type(value)] for value in values] if isinstance(values, list) else []
    given = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    found += [each for each in given if isinstance(each, str)]
    for union in ("anyOf", "oneOf", "allOf"):
        for choice in schema.get(union) or []:
            found += types_of(choice, definitions)
    return found + ["null"] * bool(schema.get("nullable"))


def _cast(given: Any, types: Sequence[str]) -> Any:
    """A text as the first type that it can be; where a string is allowed it stays one."""
    if not isinstance(given, str):
        return given
    allowed = [each for each in types if each == "null"] if "string" in types else types
    for kind in allowed:
        try:
            return _CASTS[kind](given.strip())
        except (KeyError, ValueError, SyntaxError, RecursionError, MemoryError, OverflowError):
            continue
    return given


def _integer(text: str) -> int:
    number = float(text)
    if not number.is_integer():
        raise ValueError(text)
    return int(text) if text.lstrip("+-").isdigit() else int(number)


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return _integer(text) if number.is_integer() and "." not in text else number


def _one_of(**names: Any) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        return names[text.lower()]

    return read


def _container(kind: type) -> Callable[[str], Any]:
    """Reads JSON, or the Python that models write instead."""

    def read(text: str) -> Any:
        try:
            value = read_json(text)
        except ValueError:
            value = ast.literal_eval(text)
            _ENCODER.encode(value)
        if not isinstance(value, kind):
            raise ValueError(text)
        return value

    return read


_CASTS: Mapping[str, Callable[[str], Any]] = {
    "integer": _integer,
    "number": _number,
    "boolean": _one_of(**{"true": True, "1": True, "false": False, "0": False}),
    "null": _one_of(null=None, none=None),
    "object": _container(dict),
    "array": _container(list),
}


def _json(text: str, args: Mapping[str, Any]) -> Any:
    for opening, closing in args.get("string_delims", ()):
        string = f"{regex.escape(opening)}(.*?){regex.escape(closing)}"
        text = regex.sub(string, lambda found: json.dumps(found[1]), text, flags=regex.DOTALL)
    if args.get("unquoted_keys"):
        text = _KEY.sub(lambda found: f'"{found["key"]}"' if found["key"] else found[0], text)
    try:
        return read_json(text)
    except ValueError:
        if not args.get("allow_non_json"):
            raise
        return text.strip()


def _tags(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    end = 0
    value: Mapping[str, Any] = args.get("value_parser") or {"name": "raw"}
    pattern = _compile(args["tag_pattern"], regex.DOTALL)
    for tag in pattern.finditer(text, timeout=_LIMIT_S):
        if text[end : tag.start()].strip():
            raise ValueError("there is text between tags")
        end = tag.end()
        key, one = tag["key"].strip(), _FORMS[value["name"]](tag["value"], value.get("args", {}))
        found[key] = one
    if text[end:].strip():
        raise ValueError("there is text behind the tags")
    return found


def _text(text: str, args: Mapping[str, Any]) -> str:
    return text.strip() if args.get("strip", True) else text


_FORMS: Mapping[str, Callable[[str, Mapping[str, Any]], Any]] = {
    "raw": lambda text, args: text,
    "text": _text,
    "json": _json,
    "xml-inline": _tags,
}


def _transformed(transform: Any, scope: Mapping[str, Any]) -> Any:
    """A transform, with its placeholders replaced by values."""
    if isinstance(transform, dict):
        return {key: _transformed(each, scope) for key, each in transform.items()}
    if isinstance(transform, list):
        return [_transformed(each, scope) for each in transform]
    if not (isinstance(transform, str) and transform[:1] == "{" and transform[-1:] == "}"):
        return transform
    value: Any = scope
    for key in transform[1:-1].split("."):
        if not isinstance(value, dict) or key not in value:
            raise ValueError(f"there is no {transform}")
        value = value[key]
    return value
