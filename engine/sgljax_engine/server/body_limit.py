"""Refuses bodies that are too large or too slow, before anything reads them."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive, Scope

from sgljax_engine.server.config import ServerConfig
from sgljax_engine.server.replies import HTTPError


async def whole_body(scope: Scope, receive: Receive, config: ServerConfig) -> Receive | None:
    """Reads the whole body of a request.

    Returns:
        What gives the body again, in one piece; None if the client is gone.

    Raises:
        HTTPError: 413 above `max_body_bytes`, 408 after `body_timeout_s`.
    """
    try:
        async with asyncio.timeout(config.body_timeout_s):
            body = await _read(scope, receive, config.max_body_bytes)
    except TimeoutError:
        message = f"the body did not come within {config.body_timeout_s} s"
        raise HTTPError(408, message, headers={"Connection": "close"}) from None
    if body is None:
        return None
    parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return parts.pop() if parts else await receive()

    return replay


async def _read(scope: Scope, receive: Receive, max_bytes: int) -> bytes | None:
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    # A server refuses a length that is not a number; here it only saves reading.
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(max_bytes: int) -> HTTPError:
    # What is left of the body is not read: the connection is of no more use.
    message = f"the body has more than max_body_bytes = {max_bytes} bytes"
    return HTTPError(413, message, headers={"Connection": "close"})
