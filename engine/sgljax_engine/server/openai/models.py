"""OpenAI's `/v1/models`, and the names that requests may give."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from sgljax_engine.server.context import ServerContext
from sgljax_engine.server.replies import HTTPError
from sgljax_engine.server.routes import OpenAIRoute

_MAX_LISTED = 20
"""Names that an error lists."""


def model_routes(context: ServerContext) -> APIRouter:
    """The routes."""
    router = APIRouter(route_class=OpenAIRoute)

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model, and the adapters that are loaded: each is a name for `model`."""
        names = await served_names(context)
        return {"object": "list", "data": [_model(context, name) for name in names]}

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """The model or an adapter by its name."""
        await check_model(context, model)
        return _model(context, model)

    return router


async def served_names(context: ServerContext) -> list[str]:
    """Names of the model and of the loaded adapters."""
    state = await context.engine.async_get_internal_state()
    return [context.config.model_name, *state.adapters]


async def check_model(context: ServerContext, name: str | None) -> None:
    """Raises HTTPError with status 404 for a model that is not served."""
    if name in (None, context.config.model_name):
        return
    names = await served_names(context)
    if name not in names:
        served = ", ".join(map(repr, names[:_MAX_LISTED]))
        raise HTTPError(
            404,
            f"the model {name!r} is not served; served: {served}",
            kind="not_found_error",
            param="model",
            code="model_not_found",
        )


def _model(context: ServerContext, name: str) -> dict[str, Any]:
    own_name = context.config.model_name
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "tunix-sgljax",
        "max_model_len": context.engine.max_model_len,
        "parent": None if name == own_name else own_name,
    }
