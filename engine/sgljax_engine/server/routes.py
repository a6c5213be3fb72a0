"""Kinds of routes. The matched route says which key opens it; nothing else reads the path."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from sgljax_engine.server.access import check_key
from sgljax_engine.server.body_limit import whole_body
from sgljax_engine.server.context import ServerContext
from sgljax_engine.server.json_body import read_body
from sgljax_engine.server.limits import SMALL_BYTES
from sgljax_engine.server.replies import OPENAI_WORDS, HTTPError
from sgljax_engine.server.unread import Reads

_JSON_TYPE = re.compile(r"application/(?:[\w.+-]+\+)?json")


class OpenRoute(APIRoute):
    """A route that needs no key.

    Attributes:
        key: Name of the key that opens it, a field of `ServerConfig`; None opens it to all.
        uses_openai_words: Whether its errors name OpenAI's fields.
        takes_anything: Whether query parameters and bodies that nothing reads are let pass: health
            checks of load balancers may carry some.
    """

    key: ClassVar[Literal["api_key", "admin_key"] | None] = None
    uses_openai_words: ClassVar[bool] = False
    takes_anything: ClassVar[bool] = True

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Checks the key, then reads the body, and only then lets the endpoint see the request."""
        context: ServerContext = scope["app"].state.context
        scope[OPENAI_WORDS] = self.uses_openai_words
        if self.key is not None:
            check_key(Headers(scope=scope), self.key, getattr(context.config, self.key))
        replay = await whole_body(scope, receive, context.config)
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
        reads = Reads(
            query={f.alias: _holds_list(hints[f.name]) for f in self.dependant.query_params},
            body=_fields_of(hints.get("body")),
        )

        async def answer_without(request: Request) -> Response:
            reads.check_query(request.query_params)
            reads.check_no_body(await request.body())
            return await answer(request)

        if "body" not in hints:
            return answer_without
        kind: TypeAdapter[Any] = TypeAdapter(hints["body"])

        async def read_and_answer(request: Request) -> Response:
            reads.check_query(request.query_params)
            body = await request.body()
            if not body:  # an optional one, or FastAPI says that it is missing
                return await answer(request)
            _check_is_json(request.headers.get("content-type"))
            context: ServerContext = request.app.state.context
            if len(body) <= SMALL_BYTES:
                value = read_body(body, kind, context.limits)
            else:
                value = await context.workers.run(lambda: read_body(body, kind, context.limits))
            return await answer(_ReadRequest(request, len(body), value))

        return read_and_answer


class _ReadRequest(Request):
    """A request whose body was read and checked; FastAPI's own check finds nothing to do."""

    def __init__(self, request: Request, num_bytes: int, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self.state.num_bytes = num_bytes
        self._body = b"read"
        self._value = value

    async def json(self) -> Any:
        """The checked body."""
        return self._value


def _holds_list(hint: Any) -> bool:
    return hint is list or get_origin(hint) is list or any(map(_holds_list, get_args(hint)))


def _fields_of(hint: Any) -> frozenset[str]:
    """Names of the fields of a body; none without one."""
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


class DataRoute(OpenRoute):
    """A route that generates or reads."""

    key = "api_key"
    takes_anything = False


class OpenAIRoute(DataRoute):
    """A route of OpenAI's."""

    uses_openai_words = True


class AdminRoute(OpenRoute):
    """A route that controls the engine."""

    key = "admin_key"
    takes_anything = False
