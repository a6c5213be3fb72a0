"""The ASGI app: all routes of one engine, closed to the pages of other sites."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgljax_engine import Engine
from sgljax_engine.fleet.replica import Replica
from sgljax_engine.server.chat import chat_routes
from sgljax_engine.server.completions import completion_routes
from sgljax_engine.server.config import ServerConfig, is_loopback
from sgljax_engine.server.context import ServerContext
from sgljax_engine.server.control import control_routes
from sgljax_engine.server.info import info_routes, open_routes
from sgljax_engine.server.messages import tokenizer_routes
from sgljax_engine.server.responses import (
    ERROR_RESPONSES,
    REPLICA_HEADER,
    HTTPError,
    add_error_handlers,
    error_response,
)
from sgljax_engine.server.sglang import generate_routes


def create_app(
    engine: Engine, config: ServerConfig | None = None, *, is_local: bool = False
) -> FastAPI:
    """An ASGI app that serves an engine: for `Server`, another server, or to mount in an app.

    The app does not own the engine: it neither starts nor ends it. When the app's lifespan ends,
    its unfinished requests have `drain_timeout_s`, and are aborted then. A mounted app needs its
    parent to run that lifespan, or its caller to wait for the requests.

    Args:
        engine: The engine; it may be used in process at the same time.
        config: Limits and keys; host and port are not used.
        is_local: Without keys, refuse requests whose `Host` is not the loopback address: pages of
            other sites could send them to a server on it.

    Raises:
        InvalidConfigError: as `ServerConfig`.
    """
    config = config or ServerConfig()
    context = ServerContext(engine, config)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await context.generation.drain(config.drain_timeout_s)
        await context.replica.close()

    app = FastAPI(
        title="tunix-sgljax",
        version=importlib.metadata.version("tunix-sgljax"),
        lifespan=lifespan,
        # Their pages load scripts from elsewhere; the schema itself is at /openapi.json.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.context = context
    add_error_handlers(app)
    for routes in (
        open_routes,
        info_routes,
        tokenizer_routes,
        generate_routes,
        completion_routes,
        chat_routes,
        control_routes,
    ):
        app.include_router(routes(context), responses=ERROR_RESPONSES)
    has_keys = config.api_key is not None and config.admin_key is not None
    app.add_middleware(_SameSite, is_local=is_local and not has_keys)
    app.add_middleware(_Named, replica=context.replica)
    return app


class _Named:
    """ASGI middleware that says in every reply which replica it is of."""

    def __init__(self, app: ASGIApp, *, replica: Replica) -> None:
        self._app = app
        self._replica = replica

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REPLICA_HEADER] = self._replica.id
            await send(message)

        await self._app(scope, receive, named if scope["type"] == "http" else send)


class _SameSite:
    """ASGI middleware that refuses requests which a browser sends for a page of another site.

    A server on the loopback address needs no keys, but every page that is open in a browser of the
    machine could send requests to it. Browsers say of which origin a page is. A name of another
    host that leads here ("DNS rebinding") is seen in the header `Host`.
    """

    def __init__(self, app: ASGIApp, *, is_local: bool) -> None:
        self._app = app
        self._is_local = is_local  # refuse every `Host` but the loopback address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
    return host.partition("]")[0] if host.startswith("[") else host.partition(":")[0]
