"""Errors and streams as HTTP replies, in the dialect of their route."""

from __future__ import annotations

import asyncio
import json
import math
import reprlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from sgljax_engine import (
    CompileForbiddenError,
    EngineError,
    EngineShutdownError,
    EngineStateError,
)
from sgljax_engine.server.fields import FOREIGN_FIELD, UNKNOWN_FIELD

VERSION_HEADER = "x-weight-version"
"""The weight version that sampled the last token of a reply; of a stream, that at its start."""

RETRY_AFTER_S = 1

_VERY_UNLIKELY = -9999.0

_SEND_TIMEOUT_S = 60.0
"""Seconds for a client to take what it was sent; one that reads nothing is taken for gone."""

_CLIENT_GONE = 499
"""Nginx's status for a client that is gone; only a proxy would see it."""


_MAX_MESSAGE_CHARS = 2000
"""A message that quotes a value says enough of it."""

_MAX_PARAM_CHARS = 200

_SHORT = reprlib.Repr()
"""Shortens the repr of a value of any size."""
_SHORT.maxlevel = 4
_SHORT.maxlist = _SHORT.maxdict = 16
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 160


class HTTPError(Exception):
    """Ends a request with a status and a message."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """An error.

        Args:
            status: Of the reply.
            message: For the client's developer.
            kind: OpenAI's `type` of the error.
            param: Name of the field that is wrong.
            code: OpenAI's `code`; None is the status.
            headers: More headers.
        """
        if len(message) > _MAX_MESSAGE_CHARS:
            message = f"{message[:_MAX_MESSAGE_CHARS]}..."
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param and param[:_MAX_PARAM_CHARS]
        self.code = status if code is None else code
        self.headers = dict(headers or {})


class ClientGoneError(Exception):
    """The client closed its connection: nobody reads the reply."""


def overloaded(message: str) -> HTTPError:
    """An error after which the client is to try again."""
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return HTTPError(503, message, kind="service_unavailable", headers=headers)


def as_http_error(error: BaseException) -> HTTPError:
    """The reply to an error of the engine: 400 for bad input, 409 and 503 for its state."""
    if isinstance(error, HTTPError):
        return error
    if isinstance(error, EngineShutdownError):
        return HTTPError(503, str(error), kind="service_unavailable")
    if isinstance(error, (EngineStateError, CompileForbiddenError)):
        return HTTPError(409, str(error), kind="conflict_error")
    if isinstance(error, EngineError) and isinstance(error, ValueError):
        return HTTPError(400, str(error))
    return HTTPError(500, f"{type(error).__name__}: {error}", kind="server_error")


OPENAI_WORDS = "sgljax_engine.openai_words"
"""Key of a request's scope: whether its errors name OpenAI's fields."""

_OPENAI_WORDS = {
    "template_options": "chat_template_kwargs",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "top_logprobs_num": "top_logprobs",
}


def in_openai_words(message: str) -> str:
    """The engine's message with OpenAI's names of fields."""
    for own, name in _OPENAI_WORDS.items():
        message = message.replace(own, name)
    return message


def error_body(error: HTTPError) -> dict[str, Any]:
    """OpenAI's error object, which SGLang and vLLM use too."""
    inner = {
        "message": error.message,
        "type": error.kind,
        "param": error.param,
        "code": error.code,
    }
    return {"error": inner}


def error_response(error: HTTPError) -> JSONResponse:
    """The reply."""
    return JSONResponse(error_body(error), error.status, headers=error.headers)


class ErrorObject(BaseModel):
    """The error of a refused or failed call.

    Attributes:
        message: For the client's developer.
        type: OpenAI's kind of the error.
        param: Name of the field that is wrong.
        code: The HTTP status, or OpenAI's word for the error.
    """

    message: str
    type: str
    param: str | None
    code: int | str


class ErrorReply(BaseModel):
    """Body of every reply whose status is not 200."""

    error: ErrorObject


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply, "description": text}
    for status, text in {
        400: "Bad input.",
        401: "The key is missing or wrong.",
        403: "A request of another site.",
        404: "No such route or model.",
        405: "No such method.",
        408: "The body came too slowly.",
        409: "The engine cannot do this now.",
        413: "The body is too large.",
        500: "A bug of the server.",
        503: "Overloaded, halted for too long, or shutting down.",
    }.items()
}
"""Error replies, for the OpenAPI schema."""


def describe_errors(app: FastAPI) -> None:
    """Takes out of the schema what FastAPI would answer to bad input: here it is status 400."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        schema = make()
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        return schema

    app.openapi = openapi  # as FastAPI's documentation says


def add_error_handlers(app: FastAPI) -> None:
    """Answers every exception of a route with an error object."""

    async def failed(request: Request, error: Exception) -> Response:
        answer = as_http_error(error)
        # The server's own errors have the client's words.
        if request.scope.get(OPENAI_WORDS) and not isinstance(error, HTTPError):
            answer.message = in_openai_words(answer.message)
        return error_response(answer)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_GONE)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(validation_error(error.errors()))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        # Not `request.url`, which is made of the client's header Host.
        message = f"{request.method} {request.scope['path']}: {error.detail}"
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        return error_response(
            HTTPError(error.status_code, message, kind=kind, headers=error.headers)
        )

    app.add_exception_handler(Exception, failed)  # a bug; it is logged too
    app.add_exception_handler(ClientGoneError, gone)
    app.add_exception_handler(HTTPError, failed)
    app.add_exception_handler(EngineError, failed)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


def validation_error(problems: Sequence[Any]) -> HTTPError:
    """The first problem that pydantic found, with the field's name and value."""
    # A field of several types has problems of each. What is wrong with a name says most.
    of_names = (each for each in problems if each["type"] in (UNKNOWN_FIELD, FOREIGN_FIELD))
    problem = next(of_names, problems[0])
    # Where a field may have several types, pydantic puts the type that it tried into the path.
    outer = ("body", "query", "header")
    path = [str(part) for part in problem["loc"] if part not in outer and not _is_type(part)]
    context = problem.get("ctx", {})
    if problem["type"] in (UNKNOWN_FIELD, FOREIGN_FIELD):
        path.append(context["name"])
    name = ".".join(path)[:_MAX_PARAM_CHARS]
    if problem["type"] == "json_invalid":
        return HTTPError(400, f"the body is not JSON: {context['error']}")
    if problem["type"] == UNKNOWN_FIELD:
        shown = _SHORT.repr(name)
        return HTTPError(400, f"unknown field {shown}{context['hint']}", param=shown.strip("'"))
    if problem["type"] == FOREIGN_FIELD:
        value = _SHORT.repr(context["value"])
        return HTTPError(400, f"{name}={value} is not supported: {context['instead']}", param=name)
    if problem["type"] == "missing":
        where = name or "a JSON object as body"
        return HTTPError(400, f"{where} is missing", param=name or None)
    message = problem["msg"].removeprefix("Value error, ")
    value = _SHORT.repr(problem["input"])
    return HTTPError(400, f"{name or 'the body'}: {message}, got {value}", param=name or None)


def _is_type(part: Any) -> bool:
    if not isinstance(part, str):
        return False
    # Classes of bodies begin with a capital letter, and no field does.
    is_class = part.isidentifier() and part[0].isupper()
    return is_class or part in ("str", "int", "bool") or "[" in part


def to_json(value: Any) -> str:
    """Compact JSON; ASCII, so that no text can break it.

    A log-prob of -inf is -9999.0, OpenAI's number for what is very unlikely.

    Raises:
        ValueError: for NaN and infinity, which no reply may hold.
    """
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_bounded(value), separators=(",", ":"), allow_nan=False)


def _bounded(value: Any) -> Any:
    if isinstance(value, float):
        return _VERY_UNLIKELY if value == -math.inf else value
    if isinstance(value, Mapping):
        return {name: _bounded(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_bounded(each) for each in value]
    return value


def reply(value: Any, weight_version: int, status: int = 200) -> Response:
    """A reply in JSON that says which weights it is of."""
    headers = {VERSION_HEADER: str(weight_version)}
    # One by one, so that other threads run between them.
    several = f"[{','.join(map(to_json, value))}]" if isinstance(value, list) else None
    content = to_json(value) if several is None else several
    return Response(content, status, headers, media_type="application/json")


def event(value: Any) -> str:
    """A server-sent event with a JSON value."""
    return f"data: {to_json(value)}\n\n"


DONE = "data: [DONE]\n\n"


async def with_errors(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """The events, and an error object instead of a broken connection if they fail."""
    try:
        async for each in events:
            yield each
    except Exception as error:
        yield event(error_body(as_http_error(error)))
        yield DONE


async def disconnected(receive: Receive) -> None:
    """Returns when the client is gone; the request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Closable(Protocol):
    """The source of a stream of events."""

    async def aclose(self) -> None:
        """Ends it. Idempotent."""
        ...


class EventStream(StreamingResponse):
    """Server-sent events, which end when the client is gone, also while there is none to send."""

    def __init__(self, events: AsyncIterator[str], source: Closable, weight_version: int) -> None:
        """A reply.

        Args:
            events: To send.
            source: What the events are made of; closed at the end, however that comes.
            weight_version: Put into the headers.
        """
        headers = {"Cache-Control": "no-cache", VERSION_HEADER: str(weight_version)}
        super().__init__(with_errors(events), media_type="text/event-stream", headers=headers)
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events."""

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(_SEND_TIMEOUT_S):
                await send(message)

        sending = asyncio.ensure_future(self.stream_response(send_in_time))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            gone.cancel()
            await self._source.aclose()
            await asyncio.gather(sending, gone, return_exceptions=True)
