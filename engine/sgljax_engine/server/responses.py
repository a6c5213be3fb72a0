from __future__ import annotations

import json
import math
import reprlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from sgljax_engine import (
    CompileForbiddenError,
    EngineError,
    EngineShutdownError,
    EngineStateError,
    NonFiniteLogitsError,
    WeightStoreError,
)
from sgljax_engine.server.fields import FOREIGN_FIELD, UNKNOWN_FIELD

VERSION_HEADER = "x-weight-version"
"""The weight version that sampled the last token of a reply; of a stream, that at its start."""

REPLICA_HEADER = "x-replica-id"
"""Which server of a fleet replied."""

OPENAI_WORDS = "sgljax_engine.openai_words"
"""Key of a request's scope: whether its errors name OpenAI's fields."""

DONE = "data: [DONE]\n\n"

_OPENAI_WORDS = {
    "template_options": "chat_template_kwargs",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "top_logprobs_num": "top_logprobs",
}
_VERY_UNLIKELY = -9999.0
_RETRY_AFTER_S = 1

_CLIENT_GONE = 499
"""Nginx's status for a client that is gone; only a proxy would see it."""

_MAX_MESSAGE_CHARS = 2000
_MAX_PARAM_CHARS = 200
_SHORT = reprlib.Repr()
"""Shortens the repr of a value of any size."""
_SHORT.maxlevel = 4
_SHORT.maxlist = _SHORT.maxdict = 16
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 160


class HTTPError(Exception):
    """Ends a request with a status and a message; the other fields are those of OpenAI's error."""

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


def overloaded(message: str, code: str | None = None) -> HTTPError:
    """An error after which the client is to try again, here or at another server."""
    headers = {"Retry-After": str(_RETRY_AFTER_S)}
    return HTTPError(503, message, kind="service_unavailable", code=code, headers=headers)


def as_http_error(error: BaseException) -> HTTPError:
    """The reply to an error of the engine: 400 for bad input, 409 and 503 for its state."""
    if isinstance(error, HTTPError):
        return error
    if isinstance(error, EngineShutdownError):
        return HTTPError(503, str(error), kind="service_unavailable")
    if isinstance(error, (EngineStateError, CompileForbiddenError)):
        return HTTPError(409, str(error), kind="conflict_error")
    if isinstance(error, WeightStoreError):
        return overloaded(str(error), "weight_store")
    if isinstance(error, NonFiniteLogitsError):
        problem = f"{type(error).__name__}: {error}"
        return HTTPError(500, problem, kind="server_error", code="nonfinite_logits")
    if isinstance(error, EngineError) and isinstance(error, ValueError):
        return HTTPError(400, str(error))
    return HTTPError(500, f"{type(error).__name__}: {error}", kind="server_error")


def error_body(error: HTTPError) -> dict[str, Any]:
    """OpenAI's error object, which SGLang and vLLM use too."""
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: HTTPError) -> JSONResponse:
    return JSONResponse(error_body(error), error.status, headers=error.headers)


class ErrorObject(BaseModel):
    """The error of a refused or failed call. `code` is the status, or OpenAI's word for it."""

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
        500: "A bug of the server, or logits that are NaN or infinite.",
        503: "Overloaded, halted for too long, shutting down, or without the weights for it.",
    }.items()
}
"""Error replies, for the OpenAPI schema."""


def add_error_handlers(app: FastAPI) -> None:
    """Answers every exception of a route with an error object, and says so in the schema."""

    async def failed(request: Request, error: Exception) -> Response:
        answer = as_http_error(error)
        # The server's own errors have the client's words.
        if request.scope.get(OPENAI_WORDS) and not isinstance(error, HTTPError):
            for own, name in _OPENAI_WORDS.items():
                answer.message = answer.message.replace(own, name)
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
    make = app.openapi

    def openapi() -> dict[str, Any]:
        schema = make()
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)  # FastAPI's own: here it is 400
        return schema

    app.openapi = openapi  # as FastAPI's documentation says


def validation_error(problems: Sequence[Any]) -> HTTPError:
    """The first problem that pydantic found, with the field's name and value."""
    # A field of several types has problems of each. What is wrong with a name says most.
    of_names = (each for each in problems if each["type"] in (UNKNOWN_FIELD, FOREIGN_FIELD))
    problem = next(of_names, problems[0])
    # Where a field may have several types, pydantic puts the type that it tried into the path.
    outer = ("body", "query", "header")
    path = [str(part) for part in problem["loc"] if part not in outer and not _is_type(part)]
    kind, context = problem["type"], problem.get("ctx", {})
    if kind in (UNKNOWN_FIELD, FOREIGN_FIELD):
        path.append(context["name"])
    name = ".".join(path)[:_MAX_PARAM_CHARS]
    if kind == UNKNOWN_FIELD:
        shown = _SHORT.repr(name)
        name, message = shown.strip("'"), f"unknown field {shown}{context['hint']}"
    elif kind == FOREIGN_FIELD:
        value = _SHORT.repr(context["value"])
        message = f"{name}={value} is not supported: {context['instead']}"
    elif kind == "missing":
        message = f"{name or 'a JSON object as body'} is missing"
    else:
        value, text = _SHORT.repr(problem["input"]), problem["msg"].removeprefix("Value error, ")
        message = f"{name or 'the body'}: {text}, got {value}"
    return HTTPError(400, message, param=name or None)


def _is_type(part: Any) -> bool:
    if not isinstance(part, str):
        return False
    # Classes of bodies begin with a capital letter, and no field does.
    is_class = part.isidentifier() and part[0].isupper()
    return is_class or part in ("str", "int", "bool") or "[" in part


def to_json(value: Any) -> str:
    """Compact JSON; ASCII, so that no text can break it. ValueError for NaN and infinity.

    A log-prob of -inf is -9999.0, OpenAI's number for what is very unlikely.
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


def reply(value: Any, weight_version: int) -> Response:
    """A reply in JSON that says which weights it is of."""
    headers = {VERSION_HEADER: str(weight_version)}
    # One by one, so that other threads run between them.
    content = f"[{','.join(map(to_json, value))}]" if isinstance(value, list) else to_json(value)
    return Response(content, headers=headers, media_type="application/json")


def event(value: Any) -> str:
    return f"data: {to_json(value)}\n\n"


async def with_errors(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """The events, and an error object instead of a broken connection if they fail."""
    try:
        async for each in events:
            yield each
    except Exception as error:
        yield event(error_body(as_http_error(error)))
        yield DONE
