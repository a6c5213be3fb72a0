"""Who may call: those with a bearer key, and no page of another site.

One key opens the routes that generate and read, another those that control the engine.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Header
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sgljax_engine.server.config import is_loopback
from sgljax_engine.server.replies import HTTPError, error_response

_HINT = 'send it as "Authorization: Bearer <key>"'

Check = Callable[..., Awaitable[None]]


def require_key(key: str | None, name: str) -> Check:
    """A dependency of routes that lets only those who have the key pass.

    Args:
        key: None lets everybody pass.
        name: Of the key, for messages.
    """

    async def check(
        authorization: Annotated[str | None, Header(include_in_schema=False)] = None,
    ) -> None:
        if key is None:
            return
        scheme, _, given = (authorization or "").partition(" ")
        # In constant time, whatever was given.
        matches = hmac.compare_digest(given.strip().encode(), key.encode())
        if scheme.lower() != "bearer" or not matches:
            what = "is wrong" if authorization else "is missing"
            raise HTTPError(
                401,
                f"the {name} {what}; {_HINT}",
                kind="authentication_error",
                headers={"WWW-Authenticate": "Bearer"},
            )

    return check


class SameSite:
    """ASGI middleware that refuses requests which a browser sends for a page of another site.

    A server on the loopback address needs no keys, but every page that is open in a browser of the
    machine could send requests to it. Browsers say of which origin a page is. A name of another
    host that leads here ("DNS rebinding") is seen in the header `Host`.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        """Wraps an app.

        Args:
            app: Gets what is not refused.
            host: The address that the server listens on.
        """
        self._app = app
        self._is_local = is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request."""
        problem = self._problem(Headers(scope=scope)) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
        else:
            await error_response(HTTPError(403, problem))(scope, receive, send)

    def _problem(self, headers: Headers) -> str | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._is_local and host and not is_loopback(_host_name(host)):
            return f"this server is for its own machine, and Host was {host!r}"
        if origin is not None and origin.partition("://")[2] != host:
            return f"requests of other sites are refused, and Origin was {origin!r}"
        return None


def _host_name(host: str) -> str:
    """A `Host` header without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
