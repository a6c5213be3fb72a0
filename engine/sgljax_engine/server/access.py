"""Who may call: those with a bearer key, and no page of another site.

One key opens the routes that generate and read, another those that control the engine.
"""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sgljax_engine.server.config import is_loopback
from sgljax_engine.server.replies import HTTPError, error_response

_NAMES = {"api_key": "API key", "admin_key": "admin key"}
_HINT = 'send it as "Authorization: Bearer <key>"'


def check_key(headers: Headers, name: str, key: str | None) -> None:
    """Lets only those pass who have a key.

    Args:
        headers: The request's.
        name: Of the key, a field of `ServerConfig`.
        key: The key; None lets everybody pass.

    Raises:
        HTTPError: 401.
    """
    if key is None:
        return
    authorization = headers.get("authorization", "")
    scheme, _, given = authorization.partition(" ")
    # In constant time, whatever was given.
    matches = hmac.compare_digest(given.strip().encode(), key.encode())
    if scheme.lower() == "bearer" and matches:
        return
    problem = f"the {_NAMES[name]} {'is wrong' if authorization else 'is missing'}; {_HINT}"
    more = {"WWW-Authenticate": "Bearer", "Connection": "close"}  # the body is not read
    raise HTTPError(401, problem, kind="authentication_error", headers=more)


class SameSite:
    """ASGI middleware that refuses requests which a browser sends for a page of another site.

    A server on the loopback address needs no keys, but every page that is open in a browser of the
    machine could send requests to it. Browsers say of which origin a page is. A name of another
    host that leads here ("DNS rebinding") is seen in the header `Host`.
    """

    def __init__(self, app: ASGIApp, *, is_local: bool) -> None:
        """Wraps an app.

        Args:
            app: Gets what is not refused.
            is_local: Refuse every `Host` but the loopback address.
        """
        self._app = app
        self._is_local = is_local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request."""
        problem = self._problem(Headers(scope=scope)) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
        else:
            await error_response(HTTPError(403, problem))(scope, receive, send)

    def _problem(self, headers: Headers) -> str | None:
        host = headers.get("host", "").lower()
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
        if self._is_local and host and not is_loopback(_host_name(host)):
            return f"this server is for its own machine, and Host was {host!r}"
        if origin is not None and origin.lower().partition("://")[2] != host:
            return f"requests of other sites are refused, and Origin was {origin!r}"
        if site not in ("none", "same-origin"):  # pictures and links send no Origin
            return f"requests of other sites are refused, and Sec-Fetch-Site was {site!r}"
        return None


def _host_name(host: str) -> str:
    """A `Host` header without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
