"""SGLang's routes that read: health, model, server, load."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from sgljax_engine import EngineShutdownError, EngineState, InvalidRequestError, SamplingParams
from sgljax_engine.server.context import ServerContext
from sgljax_engine.server.generation import Job, new_rids
from sgljax_engine.server.replies import overloaded
from sgljax_engine.server.routes import DataRoute, OpenRoute


def health_routes(context: ServerContext) -> APIRouter:
    """Routes that need no key."""
    router, engine = APIRouter(route_class=OpenRoute), context.engine

    @router.get("/ping")
    @router.post("/ping", operation_id="post_ping")
    @router.get("/health")
    async def health() -> Response:
        """Status 200 while the engine takes calls, also while it is paused or asleep."""
        if not engine.is_running:
            raise EngineShutdownError("the engine was shut down")
        if context.generation.is_draining:
            raise overloaded("the server is shutting down")
        return Response()

    return router


def info_routes(context: ServerContext) -> APIRouter:
    """Routes of the data key."""
    router, engine, config = APIRouter(route_class=DataRoute), context.engine, context.config

    @router.get("/health_generate")
    async def health_generate(request: Request) -> Response:
        """Status 200 once a token was generated; 503 if generation is halted too long."""
        params = SamplingParams(max_new_tokens=1, temperature=0.0)
        rids = new_rids(1, "health-")
        job = Job(input_ids=[[0]], sampling_params=[params], rids=rids)
        await context.generation.run(request, job)
        return Response()

    @router.get("/version")
    async def version() -> dict[str, str]:
        """The version of this package."""
        return {"version": _version()}

    @router.get("/model_info")
    @router.get("/get_model_info")
    async def get_model_info() -> dict[str, Any]:
        """The model's name and shape."""
        model = engine.model_config
        return {
            "model_path": config.model_name,
            "is_generation": True,
            "architecture": model.architecture,
            "vocab_size": model.vocab_size,
            "max_model_len": engine.max_model_len,
            "weight_version": engine.weight_version,
            "preferred_sampling_params": engine.get_default_sampling_params().to_dict(),
        }

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def get_server_info() -> JSONResponse:
        """Limits of the server, and the state of the engine."""
        state = await engine.async_get_internal_state()
        limits = ("max_requests", "max_body_bytes", "halt_timeout_s")
        return JSONResponse(
            {
                "version": _version(),
                "model_name": config.model_name,
                "limits": {name: getattr(config, name) for name in limits},
                "num_open_samples": context.generation.num_open,
                "internal_states": [state_dict(state)],
            }
        )

    @router.get("/weight_version")
    @router.get("/get_weight_version")
    async def get_weight_version() -> dict[str, Any]:
        """The version of the serving weights, and its label if a client gave one."""
        version = engine.weight_version
        return {"weight_version": version, "label": context.version_labels.get(version)}

    @router.get("/get_load")
    async def get_load() -> list[dict[str, Any]]:
        """Requests and tokens of the engine, for routers."""
        load = _load(await engine.async_get_internal_state(), 0)
        return [
            {
                "dp_rank": load["dp_rank"],
                "num_reqs": load["num_total_reqs"],
                "num_waiting_reqs": load["num_waiting_reqs"],
                "num_tokens": load["num_used_tokens"],
            }
        ]

    @router.get("/v1/loads")
    async def loads(
        dp_rank: Annotated[int | None, Query(ge=0)] = None,
        include: Annotated[Literal["core", "all"] | None, Query()] = None,
        format: Annotated[Literal["json"] | None, Query()] = None,
    ) -> dict[str, Any]:
        """Requests and tokens of each engine of a group, under SGLang's names of its core section.

        `/metrics` has more, for Prometheus.
        """
        del include, format  # this section, and JSON, is all that there is
        state = await engine.async_get_internal_state()
        states = state.engines or (state,)
        if dp_rank is not None and dp_rank >= len(states):
            raise InvalidRequestError(f"dp_rank must be below {len(states)}, got {dp_rank}")
        ranks = range(len(states)) if dp_rank is None else (dp_rank,)
        return {
            "timestamp": datetime.datetime.now(datetime.UTC).isoformat(),
            "version": _version(),
            "loads": [_load(states[rank], rank) for rank in ranks],
        }

    return router


def _version() -> str:
    return importlib.metadata.version("tunix-sgljax")


def _load(state: EngineState, rank: int) -> dict[str, Any]:
    used = state.total_kv_tokens - state.available_kv_tokens
    return {
        "dp_rank": rank,
        "num_running_reqs": state.running_batch_size,
        "num_waiting_reqs": state.waiting_queue_size,
        "num_total_reqs": state.running_batch_size + state.waiting_queue_size,
        "num_used_tokens": used,
        "max_total_num_tokens": state.total_kv_tokens,
        "token_usage": used / state.total_kv_tokens,
    }


_SEED_NAMES = (
    "tree_cache_size",
    "req_to_token_pool_used",
    "cur_batch_is_none",
    "last_batch_is_none",
    "chunked_req_is_none",
    "is_paused",
    "is_sleeping",
)


def state_dict(state: EngineState) -> dict[str, Any]:
    """A state as JSON, with the names that SGLang has for some of it."""
    return dataclasses.asdict(state) | {name: getattr(state, name) for name in _SEED_NAMES}
