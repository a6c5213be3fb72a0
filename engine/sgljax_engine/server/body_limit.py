"""Refuses bodies that are too large or too slow, before anything reads them."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgljax_engine.server.replies import HTTPError, error_response


class BodyLimit:
    """ASGI middleware that reads the whole body of a request, up to a size and a time."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        """Wraps an app.

        Args:
            app: Gets the body in one piece.
            max_bytes: More gets status 413.
            timeout_s: Seconds for the whole body; more gets status 408.
        """
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                body = await self._read(scope, receive)
        except TimeoutError:
            error = HTTPError(408, f"the body did not come within {self._timeout_s} s")
            await error_response(error)(scope, receive, send)
            return
        except HTTPError as error:
            await error_response(error)(scope, receive, send)
            return
        if body is None:  # the client is gone
            return
        parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return parts.pop() if parts else await receive()

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        # A server refuses a length that is not a number; here it only saves reading.
        if declared.isdigit() and int(declared) > self._max_bytes:
            raise self._too_large()
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return bytes(body)

    def _too_large(self) -> HTTPError:
        # What is left of the body is not read: the connection is of no more use.
        message = f"the body has more than max_body_bytes = {self._max_bytes} bytes"
        return HTTPError(413, message, headers={"Connection": "close"})
