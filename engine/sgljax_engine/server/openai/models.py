"""OpenAI's `/v1/models`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from sgljax_engine.server.context import ServerContext
from sgljax_engine.server.routes import OpenAIRoute


def model_routes(context: ServerContext) -> APIRouter:
    """The route."""
    router = APIRouter(route_class=OpenAIRoute)
    engine, name = context.engine, context.config.model_name

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model, and the adapters that are loaded: each is a name for `model`."""
        state = await engine.async_get_internal_state()
        own = {"max_model_len": engine.max_model_len, "parent": None}
        entries = [own, *({**own, "parent": name} for _ in state.adapters)]
        return {
            "object": "list",
            "data": [
                {"id": id_, "object": "model", "created": 0, "owned_by": "tunix-sgljax", **fields}
                for id_, fields in zip((name, *state.adapters), entries, strict=True)
            ],
        }

    return router
