"""Reads bodies; what is above a limit of docs/server.md is refused before work is done for it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter, ValidationError
from starlette.types import Message, Receive, Scope

from sgljax_engine import Engine
from sgljax_engine.server.config import ServerConfig
from sgljax_engine.server.responses import HTTPError, validation_error

SMALL_BYTES = 2048
"""A body that is parsed and tokenized within about a millisecond, on the event loop itself."""

MAX_MESSAGES = 4096
MAX_TOOLS = 1024
MAX_FIELDS = 1024
"""Most fields of one JSON object; `logit_bias` may hold the vocabulary."""

TOKENIZE_FACTOR = 4
"""`/tokenize` takes texts of so many times `max_model_len` tokens: clients cut them by it."""

_MAX_BYTES_PER_TOKEN = 256 * 12
"""No vocabulary has longer entries, and two escapes in JSON make one character."""

_SLICE_BYTES = 1 << 18
"""Other threads run between two slices."""

_MAX_ERRORS = 1000
"""Pydantic makes a dict of each error; of more, none is shown."""

_PLAIN = frozenset({int, float, bool, type(None)})
_NAMES = {str: "a string", list: "a list", int: "a number", float: "a number", bool: "a boolean"}
_BRACKETS = bytes.maketrans(b"]{}", b"[[[")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BodyLimits:
    max_containers: int  # objects and lists
    max_members: int  # of all objects
    max_strings: int  # names of fields included
    max_entries: int  # of one list
    max_literal_bytes: int  # of one string as it is written
    max_prompts: int  # entries of any list of one entry a prompt
    vocab_size: int  # fields of `logit_bias`

    @classmethod
    def for_server(cls, engine: Engine, config: ServerConfig) -> BodyLimits:
        """Limits that the largest requests which can be served are far from."""
        count, vocab_size = max(4096, config.max_requests), engine.model_config.vocab_size
        max_tokens = TOKENIZE_FACTOR * engine.max_model_len
        return cls(
            max_containers=16 * count,
            max_members=32 * count,
            max_strings=96 * count,
            max_entries=max(count, max_tokens, vocab_size),
            max_literal_bytes=_MAX_BYTES_PER_TOKEN * max_tokens,
            max_prompts=config.max_requests,
            vocab_size=vocab_size,
        )


async def whole_body(scope: Scope, receive: Receive, config: ServerConfig) -> Receive | None:
    """Reads the whole body of a request, to give it again in one piece; None if the client is gone.

    Raises HTTPError: 413 above `max_body_bytes`, 408 after `body_timeout_s`.
    """
    limit, parts = config.max_body_bytes, list[Message]()
    # What is left of a body is not read: the connection is of no more use.
    closing = {"Connection": "close"}
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    # A server refuses a length that is not a number; here it only saves reading.
    size = int(declared) if declared.isdigit() else 0
    body = bytearray()
    try:
        async with asyncio.timeout(config.body_timeout_s):
            while max(size, len(body)) <= limit and not parts:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    parts.append({"type": "http.request", "body": bytes(body), "more_body": False})
    except TimeoutError:
        problem = f"the body did not come within {config.body_timeout_s} s"
        raise HTTPError(408, problem, headers=closing) from None
    if max(size, len(body)) > limit:
        problem = f"the body has more than max_body_bytes = {limit} bytes"
        raise HTTPError(413, problem, headers=closing)

    async def replay() -> Message:
        return parts.pop() if parts else await receive()

    return replay


def read_body(body: bytes, kind: TypeAdapter[Any], limits: BodyLimits) -> Any:
    """The checked body, or HTTPError 400 with the field's name, value and limit. Any thread."""
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
