"""Grammars of arguments that are no JSON: tags, as Qwen3-Coder writes them, and Gemma's objects.

Every value that a grammar lets through is valid under its schema once `values.py` has read it. What
has no such grammar is refused by name. Expressions are of llguidance's Lark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sgljax_engine import InvalidRequestError
from sgljax_engine.replies.lark import LarkWriter
from sgljax_engine.replies.values import TYPE_NAMES, definitions_of, types_of

Schema = Mapping[str, Any]

_NOTES = frozenset(
    {"title", "description", "default", "examples", "$schema", "$defs", "definitions", "$comment"}
    | {"deprecated", "readOnly", "writeOnly", "format"}
)
"""Keys of a schema that forbid nothing; the standard has `format` as a note too."""

_RANGE = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_KEYS: Mapping[str | None, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength"}),
    "integer": _RANGE,
    "number": _RANGE,
}
"""Keys that these grammars follow, by type."""

_CONSTANTS = frozenset({"enum", "const"})
_PLAIN = ("integer", "number", "boolean", "null")
_PLAIN_KEY = re.compile(r"[\w.-]+", re.ASCII)
_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_.-]*/"


class _Schemas:
    """Reads the schema of one tool's parameters.

    Raises InvalidRequestError, from all methods, for what it cannot follow.
    """

    def __init__(self, tool: str, root: Schema) -> None:
        self._tool, self._root = tool, root

    def refused(self, what: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"the parameters of the tool {self._tool!r} have {what}, which has no grammar in the "
            "model's format of tool calls"
        )

    def with_definitions(self, schema: Schema) -> Schema:
        """A part of the schema that stands alone."""
        shared = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return {**shared, **schema}

    def branches(self, schema: Any, depth: int = 0) -> list[Schema]:
        """Schemas of one type at most, of which a value must meet one."""
        if depth > 32:
            raise self.refused("a $ref that leads to itself")
        if schema is True:
            return [{}]
        if not isinstance(schema, Mapping):
            raise self.refused(f"the schema {schema!r}")
        for key in ("$ref", "anyOf", "oneOf", "allOf"):
            if key not in schema:
                continue
            if others := schema.keys() - _NOTES - {key}:
                raise self.refused(f"{key} beside {sorted(others)}")
            given = [self.target(schema[key])] if key == "$ref" else schema[key]
            if key == "allOf" and len(given) != 1:
                raise self.refused("allOf of several schemas")
            found = [branch for each in given for branch in self.branches(each, depth + 1)]
            if key == "oneOf" and len({each.get("type") for each in found}) < len(found):
                raise self.refused("oneOf of schemas of the same type")
            return found
        kinds = schema.get("type")
        if not isinstance(kinds, list):
            return [self._checked(schema, kinds)]
        known = frozenset().union(*(_KEYS.get(kind, frozenset()) for kind in kinds))
        return [
            self._checked({k: v for k, v in schema.items() if k not in known - _keys(kind)}, kind)
            for kind in kinds
        ]

    def _checked(self, schema: Schema, kind: str | None) -> Schema:
        for name, key in (("object", "properties"), ("array", "items")):
            if kind is None and key in schema:
                kind = name
        names_all = not _CONSTANTS.isdisjoint(schema)
        others = schema.keys() - _NOTES - {"type"} - (_CONSTANTS if names_all else _keys(kind))
        if others:
            key = min(others)
            raise self.refused(f"{key}={schema[key]!r}")
        return schema if kind is None else {**schema, "type": kind}

    def target(self, ref: Any) -> Schema:
        found: Any = self._root
        for part in str(ref).removeprefix("#").strip("/").split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        if not str(ref).startswith("#/") or not isinstance(found, Mapping):
            raise self.refused(f"$ref={ref!r}")
        return found

    def constants(self, schema: Schema) -> list[Any] | None:
        """The values of a schema that names all of them."""
        if _CONSTANTS.isdisjoint(schema):
            return None
        given = [schema["const"]] if "const" in schema else schema["enum"]
        kind = schema.get("type")
        found = [each for each in given if kind in (None, TYPE_NAMES[type(each)])]
        found += [each for each in given if kind == "number" and type(each) is int]
        if not found:
            raise self.refused(f"no value of the type {kind!r} in {given!r}")
        return found

    def members(self, schema: Schema) -> Iterator[tuple[str, Any, bool]]:
        """Name, schema and whether it is required, of each property."""
        properties, required = schema.get("properties", {}), schema.get("required", ())
        if schema.get("additionalProperties", True) not in (True, False, {}):
            raise self.refused(f"additionalProperties={schema['additionalProperties']!r}")
        for name in dict.fromkeys([*properties, *required]):
            yield name, properties.get(name, True), name in required

    def is_free(self, schema: Schema) -> bool:
        """Whether any properties may be there."""
        names = (schema.get("properties"), schema.get("required"))
        return not any(names) and schema.get("additionalProperties", True) in (True, {})


def _keys(kind: str | None) -> frozenset[str]:
    return _KEYS.get(kind, frozenset())


def _lengths(schema: Schema) -> dict[str, Any]:
    return {"low": schema.get("minLength", 0), "high": schema.get("maxLength")}


class Tags:
    """Arguments as `<parameter=x>`, a line, the value, a line and `</parameter>`.

    Texts stand as they are, and other values as JSON.
    """

    _END = "\n</parameter>\n"
    _MARKS = ("<parameter=", "</parameter", "<function=", "</function", "<tool_call", "</tool_call")

    def __init__(self, writer: LarkWriter, tool: str, schema: Schema) -> None:
        self._writer, self._root = writer, schema
        self._schemas = _Schemas(tool, schema)

    def arguments(self) -> str:
        found = self._schemas.branches({"type": "object", **self._root})
        if len(found) != 1:
            raise self._schemas.refused("several types")
        text, schema = self._writer.text, found[0]
        if self._schemas.is_free(schema):
            key = self._writer.rule("KEY", _ANY_KEY)
            return f"({text('<parameter=')} {key} {text('>' + chr(10))} {self._raw({})})*"
        parts = []
        for name, inner, is_required in self._schemas.members(schema):
            if not re.fullmatch(r"[^<>\n]+", name) or name != name.strip():
                raise self._schemas.refused(f"the name {name!r}")
            value = self._value(inner)
            part = f"({text(f'<parameter={name}>' + chr(10))} ({value}))"
            parts.append(part if is_required else f"{part}?")
        return " ".join(parts)

    def _value(self, schema: Any) -> str:
        kinds = types_of(schema, definitions_of(self._root))
        if kinds and "string" not in kinds:
            alone = self._schemas.with_definitions(schema)
            return f"{self._writer.json(alone)} {self._writer.text(self._END)}"
        # Where a text is allowed, other values but null are read as texts.
        found = []
        for each in self._schemas.branches(schema):
            if each.get("type") == "null":
                found.append(self._writer.text("null" + self._END))
            elif each.get("type") in ("string", None):
                found += self._texts(each)
        if not found:
            raise self._schemas.refused(f"the schema {schema!r}")
        return " | ".join(found)

    def _texts(self, schema: Schema) -> list[str]:
        values = self._schemas.constants(schema)
        if values is None:
            return [self._raw(schema)]
        texts = [each for each in values if isinstance(each, str)]
        if any(mark in text for text in texts for mark in self._MARKS):
            raise self._schemas.refused(f"marks of calls in enum={texts!r}")
        return [self._writer.text(each + self._END) for each in texts]

    def _raw(self, schema: Schema) -> str:
        free = self._writer.free_text(self._MARKS, **_lengths(schema))
        return self._writer.text_until(free, self._END)


class GemmaObjects:
    """Arguments as Gemma 4 writes them: JSON with keys without quotes, and a mark around texts."""

    QUOTE = '<|"|>'

    def __init__(self, writer: LarkWriter, tool: str, schema: Schema) -> None:
        self._writer, self._root = writer, schema
        self._schemas = _Schemas(tool, schema)
        self._targets: dict[str, str] = {}

    def arguments(self) -> str:
        return self._value({"type": "object", **self._root})

    def _value(self, schema: Any) -> str:
        """A rule for values of a schema; one for each target of `$ref`, which may hold itself."""
        if (
            isinstance(schema, Mapping)
            and "$ref" in schema
            and not schema.keys() - _NOTES - {"$ref"}
        ):
            ref = str(schema["$ref"])
            if ref not in self._targets:
                self._targets[ref] = name = self._writer.new_name("target")
                target = self._schemas.target(ref)
                self._writer.define(name, self._value(target))
            return self._targets[ref]
        found = [self._one(each) for each in self._schemas.branches(schema)]
        return self._writer.rule("value", " | ".join(found))

    def _one(self, schema: Schema) -> str:
        values, kind = self._schemas.constants(schema), schema.get("type")
        if values is not None:
            return " | ".join(self._writer.text(self._written(each)) for each in values)
        if kind in _PLAIN:
            return self._writer.json(self._schemas.with_definitions(schema))
        kinds: Mapping[Any, Callable[[Schema], str]] = {
            "object": self._object,
            "array": self._array,
            "string": self._text,
            None: lambda _: self._any(),
        }
        if kind not in kinds:
            raise self._schemas.refused(f"type={kind!r}")
        return kinds[kind](schema)

    def _text(self, schema: Schema) -> str:
        quote = self._writer.text(self.QUOTE)
        free = self._writer.free_text([self.QUOTE], **_lengths(schema))
        return f"{quote} {self._writer.text_until(free, self.QUOTE)}"

    def _array(self, schema: Schema) -> str:
        value = self._value(schema.get("items", True))
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        if high == 0:
            return '"[]"'
        last = "" if high is None else high - 1
        inner = f'{value} ("," {value}){{{max(low - 1, 0)},{last}}}'
        return f'"[" {inner} "]"' if low else f'"[" ({inner})? "]"'

    def _object(self, schema: Schema) -> str:
        if self._schemas.is_free(schema):
            return self._any_object(self._any())
        members = list(self._schemas.members(schema))
        made: dict[tuple[int, bool], str] = {}

        def rest(number: int, is_first: bool) -> str:
            """What follows of the object, from a property on."""
            if number == len(members):
                return '"}"'
            if (number, is_first) not in made:
                name, _, is_required = members[number]
                key = name if _PLAIN_KEY.fullmatch(name) else json.dumps(name)
                item = self._writer.text(f"{'' if is_first else ','}{key}:")
                body = f"{item} {values[number]} {rest(number + 1, False)}"
                body += "" if is_required else f" | {rest(number + 1, is_first)}"
                made[number, is_first] = self._writer.rule("members", body)
            return made[number, is_first]

        values = [self._value(inner) for _, inner, _ in members]
        return f'"{{" {rest(0, True)}'

    def _any(self) -> str:
        if "any" not in self._targets:
            self._targets["any"] = name = self._writer.new_name("any")
            plain = self._writer.json({"type": list(_PLAIN)})
            array = f'"[" ({name} ("," {name})*)? "]"'
            body = f"{self._text({})} | {plain} | {array} | {self._any_object(name)}"
            self._writer.define(name, body)
        return self._targets["any"]

    def _any_object(self, value: str) -> str:
        key = self._writer.rule("KEY", _ANY_KEY)
        member = f'{key} ":" {value}'
        return f'"{{" ({member} ("," {member})*)? "}}"'

    def _written(self, value: Any) -> str:
        if isinstance(value, str):
            if self.QUOTE in value:
                raise self._schemas.refused(f"{self.QUOTE} in enum={value!r}")
            return f"{self.QUOTE}{value}{self.QUOTE}"
        if isinstance(value, list):
            return f"[{','.join(map(self._written, value))}]"
        if isinstance(value, dict):
            inner = (f"{json.dumps(key)}:{self._written(each)}" for key, each in value.items())
            return f"{{{','.join(inner)}}}"
        return json.dumps(value)
