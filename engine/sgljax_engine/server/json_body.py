"""Reads JSON bodies. What holds too much is refused by counts, before anything is made of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sgljax_engine.server.limits import MAX_FIELDS, MAX_MESSAGES, MAX_TOOLS, SMALL_BYTES, BodyLimits
from sgljax_engine.server.replies import HTTPError, validation_error

_PLAIN = frozenset({int, float, bool, type(None)})

_SLICE_BYTES = 1 << 18
"""Other threads run between two slices."""

_MAX_ERRORS = 1000
"""Pydantic makes a dict of each error; of more, none is shown."""

_NAMES = {str: "a string", list: "a list", int: "a number", float: "a number", bool: "a boolean"}

_BRACKETS = bytes.maketrans(b"]{}", b"[[[")

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_body(body: bytes, kind: TypeAdapter[Any], limits: BodyLimits) -> Any:
    """The checked body of a request. Any thread.

    Args:
        body: UTF-8.
        kind: What it must be.
        limits: Checked before the work that they bound.

    Raises:
        HTTPError: 400 with the field's name, value and limit.
    """
    if len(body) > SMALL_BYTES:
        _check_counts(body, limits)
    try:
        # Not `json.loads(bytes)`, which takes UTF-16 too: the counts are those of UTF-8.
        text = body.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant, parse_int=_parse_int)
    except UnicodeDecodeError as error:
        raise HTTPError(400, f"the body is not UTF-8: {error.reason} at {error.start}") from None
    except json.JSONDecodeError as error:
        raise HTTPError(400, f"the body is not JSON: {error.msg} at {error.pos}") from None
    except (ValueError, RecursionError) as error:
        raise HTTPError(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict) and value is not None:
        raise HTTPError(400, f"the body must be a JSON object, got {_NAMES[type(value)]}")
    _check_lists(value or {}, limits)
    _check_fields(value, limits, has_surrogates=bool(_SURROGATE.search(text)))
    del text
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        if error.error_count() > _MAX_ERRORS:
            message = f"the body has {error.error_count()} fields that are unknown or wrong"
            raise HTTPError(400, message) from None
        raise validation_error(error.errors(include_url=False)) from None


def _parse_int(text: str) -> int:
    """Python code, so that other threads run while a long list is parsed."""
    return int(text)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _check_counts(body: bytes, limits: BodyLimits) -> None:
    """Counts what JSON would become, without making it."""
    containers = members = quotes = start = 0
    run = literal = 0  # entries since the last bracket, and bytes of the string, that may go on
    while start < len(body):
        piece = body[start : start + _SLICE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # an escape must not be divided
            piece = body[start : start + _SLICE_BYTES + 1]
        start += len(piece)
        parts = piece.replace(b"\\\\", b"__").replace(b'\\"', b"__").split(b'"')
        outside = b"".join(parts[quotes % 2 :: 2])
        inside = [len(each) for each in parts[1 - quotes % 2 :: 2]]
        if quotes % 2:
            inside[0] += literal
        runs = [each.count(b",") for each in outside.translate(_BRACKETS).split(b"[")]
        runs[0] += run
        quotes += len(parts) - 1
        run, literal = runs[-1], inside[-1] if quotes % 2 else 0
        containers += outside.count(b"[") + outside.count(b"{")
        members += outside.count(b":")
        for what, count, limit in (
            ("objects and lists", containers, limits.max_containers),
            ("fields", members, limits.max_members),
            ("strings", quotes // 2, limits.max_strings),
            ("entries in a list or object", max(runs) + 1, limits.max_entries),
            ("bytes in a string", max(inside, default=0), limits.max_literal_bytes),
        ):
            if count > limit:
                raise HTTPError(400, f"the body has more than {limit} {what}")


def _check_lists(value: dict[str, Any], limits: BodyLimits) -> None:
    """The lists of a request by their own names."""
    named = {"messages": MAX_MESSAGES, "tools": MAX_TOOLS}
    for name, given in value.items():
        if not isinstance(given, list):
            continue
        is_flat = given and isinstance(given[0], (int, float))
        limit = named.get(name, None if is_flat else limits.max_prompts)
        if limit is not None and len(given) > limit:
            message = f"{name} must have at most {limit} entries, got {len(given)}"
            raise HTTPError(400, message, param=name)


def _check_fields(value: Any, limits: BodyLimits, *, has_surrogates: bool) -> None:
    for path, each in _walk(value, "", with_strings=has_surrogates):
        if isinstance(each, str):
            _check_text(path, each)
            continue
        limit = limits.vocab_size if path.endswith("logit_bias") else MAX_FIELDS
        if len(each) > limit:
            message = f"{path or 'the body'} must have at most {limit} fields, got {len(each)}"
            raise HTTPError(400, message, param=path or None)
        if has_surrogates:
            for name in each:
                _check_text(path, name)


def _check_text(path: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise HTTPError(
            400,
            f"{path or 'the body'} must be text without lone surrogates, got "
            f"{text[error.start]!r} at position {error.start}",
            param=path or None,
        ) from None


def _walk(value: Any, path: str, *, with_strings: bool) -> Iterator[tuple[str, Any]]:
    """All objects in a value, and its strings, each with its path."""
    left = [(path, value)]
    while left:
        path, value = left.pop()
        if isinstance(value, dict):
            yield path, value
            inner: Any = value.items()
        elif isinstance(value, list):
            if _PLAIN.issuperset(map(type, value)):
                continue
            inner = enumerate(value)
        elif with_strings and isinstance(value, str):
            yield path, value
            continue
        else:
            continue
        kinds = (dict, list, str) if with_strings else (dict, list)
        left += [
            (f"{path}.{name}" if path else str(name), each)
            for name, each in inner
            if isinstance(each, kinds)
        ]
