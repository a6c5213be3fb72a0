"""Kinds of routes. The matched route says which key opens it; nothing else reads the path."""

from __future__ import annotations

from typing import ClassVar, Literal

from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from sgljax_engine.server.access import check_key
from sgljax_engine.server.body_limit import whole_body
from sgljax_engine.server.context import ServerContext
from sgljax_engine.server.replies import OPENAI_WORDS


class OpenRoute(APIRoute):
    """A route that needs no key.

    Attributes:
        key: Name of the key that opens it, a field of `ServerConfig`; None opens it to all.
        uses_openai_words: Whether its errors name OpenAI's fields.
    """

    key: ClassVar[Literal["api_key", "admin_key"] | None] = None
    uses_openai_words: ClassVar[bool] = False

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Checks the key, then reads the body, and only then lets the endpoint see the request."""
        context: ServerContext = scope["app"].state.context
        scope[OPENAI_WORDS] = self.uses_openai_words
        if self.key is not None:
            check_key(Headers(scope=scope), self.key, getattr(context.config, self.key))
        replay = await whole_body(scope, receive, context.config)
        if replay is not None:
            await super().handle(scope, replay, send)


class DataRoute(OpenRoute):
    """A route that generates or reads."""

    key = "api_key"


class OpenAIRoute(DataRoute):
    """A route of OpenAI's."""

    uses_openai_words = True


class AdminRoute(OpenRoute):
    """A route that controls the engine."""

    key = "admin_key"
