"""Kinds of routes: which key opens one, and how its request is read.

The matched route says which key opens it; nothing else reads the path.
"""

from __future__ import annotations

import difflib
import functools
import hmac
import json
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter
from starlette.datastructures import Headers, QueryParams
from starlette.types import Receive, Scope, Send

from sgljax_engine.server.body import SMALL_BYTES, read_body, whole_body
from sgljax_engine.server.context import ServerContext
from sgljax_engine.server.responses import OPENAI_WORDS, HTTPError

_JSON_TYPE = re.compile(r"application/(?:[\w.+-]+\+)?json")
_KEYS = {"api_key": "API key", "admin_key": "admin key"}
_MAX_NAME_LEN = 64


class OpenRoute(APIRoute):
    """A route that needs no key; `key` names that of others, a field of `ServerConfig`.

    `takes_anything` lets query parameters and bodies pass that nothing reads: health checks of load
    balancers may carry some.
    """

    key: ClassVar[Literal["api_key", "admin_key"] | None] = None
    uses_openai_words: ClassVar[bool] = False
    takes_anything: ClassVar[bool] = True

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Checks the key, then reads the body, and only then lets the endpoint see the request."""
        config = scope["app"].state.context.config
        scope[OPENAI_WORDS] = self.uses_openai_words
        if self.key is not None:
            _check_key(Headers(scope=scope), _KEYS[self.key], getattr(config, self.key))
        replay = await whole_body(scope, receive, config)
        if replay is not None:
            await super().handle(scope, replay, send)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler behind a reader that parses and checks large bodies on a thread.

        What the endpoint does not read is refused by name.
        """
        answer = super().get_route_handler()
        if self.takes_anything:
            return answer
        hints = get_type_hints(self.endpoint, include_extras=True)
        query = {f.alias: _holds_list(hints[f.name]) for f in self.dependant.query_params}
        fields = _fields_of(hints.get("body"))
        kind = TypeAdapter(hints["body"]) if "body" in hints else None

        async def read_and_answer(request: Request) -> Response:
            _check_query(request.query_params, query, fields)
            body = await request.body()
            if kind is None:
                _check_no_body(body, query)
                return await answer(request)
            if not body:  # an optional one, or FastAPI says that it is missing
                return await answer(request)
            _check_is_json(request.headers.get("content-type"))
            context: ServerContext = request.app.state.context
            read = functools.partial(read_body, body, kind, context.limits)
            is_small = len(body) <= SMALL_BYTES
            value = read() if is_small else await context.workers.run(read)
            return await answer(_ReadRequest(request, len(body), value))

        return read_and_answer


class DataRoute(OpenRoute):
    """A route that generates or reads."""

    key = "api_key"
    takes_anything = False


class OpenAIRoute(DataRoute):
    uses_openai_words = True


class AdminRoute(OpenRoute):
    """A route that controls the engine."""

    key = "admin_key"
    takes_anything = False


class _ReadRequest(Request):
    """A request whose body was read and checked; FastAPI's own check finds nothing to do."""

    def __init__(self, request: Request, num_bytes: int, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self.state.num_bytes = num_bytes
        self._body = b"read"
        self._value = value

    async def json(self) -> Any:
        return self._value


def _check_key(headers: Headers, name: str, key: str | None) -> None:
    if key is None:
        return
    authorization = headers.get("authorization", "")
    scheme, _, given = authorization.partition(" ")
    # In constant time, whatever was given.
    matches = hmac.compare_digest(given.strip().encode(), key.encode())
    if scheme.lower() == "bearer" and matches:
        return
    raise HTTPError(
        401,
        f"the {name} {'is wrong' if authorization else 'is missing'}; "
        'send it as "Authorization: Bearer <key>"',
        kind="authentication_error",
        headers={"WWW-Authenticate": "Bearer", "Connection": "close"},  # the body is not read
    )


def _holds_list(hint: Any) -> bool:
    return hint is list or get_origin(hint) is list or any(map(_holds_list, get_args(hint)))


def _fields_of(hint: Any) -> frozenset[str]:
    kinds = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type)]
    return frozenset(
        name for kind in kinds if issubclass(kind, BaseModel) for name in kind.model_fields
    )


def _check_is_json(content_type: str | None) -> None:
    # Other types are what a page of another site could send without asking.
    kind = (content_type or "").partition(";")[0].strip().lower()
    if not _JSON_TYPE.fullmatch(kind):
        given = "none was sent" if content_type is None else f"got {content_type[:100]!r}"
        raise HTTPError(400, f"the header Content-Type must be application/json, {given}")


def _check_query(given: QueryParams, query: Mapping[str, bool], fields: frozenset[str]) -> None:
    """Refuses a parameter that the route does not read, or whose value it would not."""
    for name in given:
        if name in query:
            count = len(given.getlist(name))
            if count > 1 and not query[name]:
                raise HTTPError(400, f"{name} must be given once, got {count}", param=name)
            continue
        near = difflib.get_close_matches(name[:_MAX_NAME_LEN], query, n=1)
        if name in fields:
            hint = "it is a field of the JSON body"
        elif near:
            hint = f"did you mean {near[0]!r}?"
        else:
            hint = f"the route reads {', '.join(map(repr, query)) or 'none'}"
        shown = repr(name[:_MAX_NAME_LEN])
        raise HTTPError(400, f"unknown query parameter {shown}; {hint}", param=name)


def _check_no_body(body: bytes, query: Mapping[str, bool]) -> None:
    """Refuses a body that asks for something, on a route without one."""
    try:
        given = json.loads(body) if body.strip() and len(body) <= SMALL_BYTES else body.strip()
    except (ValueError, RecursionError):
        given = body
    if not given:  # nothing, null or {}
        return
    if not isinstance(given, dict):
        raise HTTPError(400, f"the route reads no body, got {len(body)} bytes")
    name = next(iter(given))
    hint = "; it is a query parameter" if name in query else ""
    shown = repr(name[:_MAX_NAME_LEN])
    raise HTTPError(400, f"unknown field {shown}: the route reads no body{hint}", param=name)
