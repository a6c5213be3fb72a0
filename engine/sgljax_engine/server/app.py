"""The ASGI app: all routes of one engine."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import AsyncIterator

from fastapi import FastAPI

from sgljax_engine import Engine
from sgljax_engine.server.access import SameSite
from sgljax_engine.server.config import ServerConfig
from sgljax_engine.server.context import ServerContext, TokenTexts
from sgljax_engine.server.generation import Generation
from sgljax_engine.server.limits import BodyLimits
from sgljax_engine.server.openai.chat import chat_routes
from sgljax_engine.server.openai.completions import completion_routes
from sgljax_engine.server.openai.models import model_routes
from sgljax_engine.server.page.routes import page_routes
from sgljax_engine.server.replies import ERROR_RESPONSES, add_error_handlers, describe_errors
from sgljax_engine.server.sglang.control import control_routes
from sgljax_engine.server.sglang.generate import generate_routes
from sgljax_engine.server.sglang.info import health_routes, info_routes
from sgljax_engine.server.vllm import read_routes, sleep_routes
from sgljax_engine.server.workers import Workers


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
    context = ServerContext(
        engine=engine,
        config=config,
        generation=Generation(engine, config),
        token_texts=TokenTexts(engine),
        limits=BodyLimits.for_server(engine, config),
        workers=Workers(),
    )

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await context.generation.drain(config.drain_timeout_s)
        context.workers.close()

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
    for router in (
        health_routes(context),
        page_routes(context),
        generate_routes(context),
        info_routes(context),
        read_routes(context),
        model_routes(context),
        completion_routes(context),
        chat_routes(context),
        control_routes(context),
        sleep_routes(context),
    ):
        app.include_router(router, responses=ERROR_RESPONSES)
    describe_errors(app)
    has_keys = config.api_key is not None and config.admin_key is not None
    app.add_middleware(SameSite, is_local=is_local and not has_keys)
    return app
