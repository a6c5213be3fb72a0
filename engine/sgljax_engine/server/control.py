"""Routes of the admin key: pause, continue, abort, flush, weights, sleep; SGLang's and vLLM's."""

from __future__ import annotations

import dataclasses
import functools
import logging
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.responses import JSONResponse, PlainTextResponse, Response

from sgljax_engine import (
    AbortReq,
    Engine,
    EngineError,
    EngineStateError,
    InvalidRequestError,
)
from sgljax_engine.fleet.follower import WeightFollower
from sgljax_engine.server.context import ServerContext
from sgljax_engine.server.fields import Body
from sgljax_engine.server.responses import as_http_error, error_body
from sgljax_engine.server.routes import AdminRoute

logger = logging.getLogger(__name__)

_FLUSH_NOTE = (
    "(When requests are running, or paused in place, the operation will not be performed.)\n"
)


class PauseGeneration(Body):
    """Body of `/pause_generation`."""

    mode: Literal["abort", "retract", "in_place", "wait"] = "abort"


class Empty(Body):
    """A body without fields."""


class AbortRequest(Body):
    """Body of `/abort_request`."""

    rid: str | None = None
    abort_all: bool = False
    finished_reason: dict[str, Any] | None = None
    aborted_message: str | None = None


class UpdateWeightsFromDisk(Body):
    """Body of `/update_weights_from_disk`."""

    model_path: str = Field(description="a folder of safetensors below weights_root")
    load_format: Literal["auto", "safetensors"] | None = None
    mode: Literal["abort", "retract", "in_place", "wait"] | None = None
    flush_cache: bool | None = None
    block_generation: bool | None = Field(
        None,
        description="instead of mode: false lets started requests finish first, true interrupts "
        "them, and flush_cache then says whether they are prefilled anew",
    )
    abort_all_requests: bool = Field(False, description='the same as mode "abort"')
    weight_version: str | None = Field(None, description="a label of the new version")


class StageWeightVersion(Body):
    """Body of `/stage_weight_version`."""

    version: int = Field(ge=1, description="a version of the server's weights_store")


class PublishWeightVersion(StageWeightVersion):
    """Body of `/publish_weight_version`."""

    mode: Literal["abort", "retract", "in_place", "wait"] = "retract"


class MemoryOccupation(Body):
    """Body of `/release_memory_occupation` and `/resume_memory_occupation`."""

    tags: list[Literal["weights", "kv_cache"]] | None = None


def control_routes(context: ServerContext) -> APIRouter:
    router, engine = APIRouter(route_class=AdminRoute), context.engine

    @router.post("/pause_generation")
    async def pause_generation(body: PauseGeneration | None = None) -> dict[str, Any]:
        """Pauses generation; see `Engine.pause_generation`. The default mode is SGLang's."""
        await engine.async_pause_generation((body or PauseGeneration()).mode)
        return {"message": "Generation paused successfully.", "status": "ok"}

    @router.post("/continue_generation")
    async def continue_generation(body: Empty | None = None) -> dict[str, Any]:
        """Continues generation."""
        await engine.async_continue_generation()
        return {"message": "Generation continued successfully.", "status": "ok"}

    @router.post("/abort_request")
    async def abort_request(body: AbortRequest) -> dict[str, Any]:
        """Ends a request, or all, also those of the process that runs the engine."""
        request = AbortReq(
            rid=body.rid or None,
            abort_all=body.abort_all,
            finished_reason=body.finished_reason,
            aborted_message=body.aborted_message,
        )
        count = await engine.async_abort_request(
            request.rid, request.abort_all, message=request.message
        )
        return {"status": "ok", "num_aborted": count}

    refused: dict[int | str, dict[str, Any]] = {400: {"description": "Requests hold pages."}}
    plain: dict[str, Any] = {"response_class": PlainTextResponse, "responses": refused}

    @router.get("/flush_cache", operation_id="get_flush_cache", **plain)
    @router.post("/flush_cache", **plain)
    async def flush_cache() -> Response:
        """Empties the prefix cache; status 400 when requests hold pages."""
        answer = await engine.async_flush_cache()
        text = f"{'Cache' if answer.success else 'Not'} flushed.\n{_FLUSH_NOTE}"
        if answer.success and answer.flushed_items:
            text += f"Flushed items: {answer.flushed_items}\n"
        elif not answer.success:
            text += f"Reason: {answer.error_msg}\n"
        return PlainTextResponse(text, 200 if answer.success else 400)

    @router.post("/update_weights_from_disk")
    async def update_weights_from_disk(body: UpdateWeightsFromDisk) -> JSONResponse:
        """Loads weights of the same model from a folder of safetensors below weights_root."""
        try:
            folder = _folder(context.config.weights_root, body.model_path)
            mode, flush = _update_mode(body)
            version = await engine.async_update_weights(folder, mode=mode, flush_cache=flush)
        except Exception as error:
            if not isinstance(error, EngineError):
                logger.exception("an update of weights failed")
            failed = as_http_error(error)
            # Says nothing of where on the disk the root is.
            failed.message = failed.message.replace(
                str(context.config.weights_root), "weights_root"
            )
            content = {"success": False, "message": failed.message, **error_body(failed)}
            return JSONResponse(content, failed.status)
        if body.weight_version is not None:
            context.version_labels[version] = body.weight_version
        message = f"Succeeded to update model weights. Weight version updated to {version}."
        return JSONResponse({"success": True, "message": message, "weight_version": version})

    @router.post("/release_memory_occupation")
    async def release_memory_occupation(body: MemoryOccupation | None = None) -> dict[str, Any]:
        """Frees memory, of all or of what the tags name; the weights are kept on the host."""
        tags = (body or MemoryOccupation()).tags
        return {"status": "ok", "num_bytes": await engine.async_sleep(1, tags=tags)}

    @router.post("/resume_memory_occupation")
    async def resume_memory_occupation(body: MemoryOccupation | None = None) -> dict[str, Any]:
        """Takes memory again, of all or of what the tags name."""
        tags = (body or MemoryOccupation()).tags
        return {"status": "ok", "num_bytes": await engine.async_wake_up(tags)}

    _add_versions(router, context)
    _add_vllms(router, engine)
    return router


def _add_versions(router: APIRouter, context: ServerContext) -> None:
    replica = context.replica

    def follower() -> WeightFollower:
        if replica.follower is None:
            raise EngineStateError(
                "the server was started without weights_store, which versions come from"
            )
        return replica.follower

    @router.post("/stage_weight_version")
    async def stage_weight_version(body: StageWeightVersion) -> dict[str, Any]:
        """Reads a version of the store and makes its weights beside the serving ones."""
        staged = await replica.ask(functools.partial(follower().stage, body.version))
        return {"success": True, **dataclasses.asdict(staged)}

    @router.post("/publish_weight_version")
    async def publish_weight_version(body: PublishWeightVersion) -> dict[str, Any]:
        """Serves a version of the store, staged before or now; the newest one stays."""
        publish = functools.partial(follower().publish, body.version, body.mode)
        return {"success": True, "weight_version": await replica.ask(publish)}


def _add_vllms(router: APIRouter, engine: Engine) -> None:
    @router.post("/sleep")
    async def sleep(
        level: Annotated[Literal["1", "2"], Query()] = "1",
        preserve_state: Annotated[bool, Query()] = False,
        tags: Annotated[list[Literal["weights", "kv_cache"]] | None, Query()] = None,
    ) -> Response:
        """Frees memory, of all or of what the tags name; see `Engine.sleep`."""
        await engine.async_sleep(int(level), preserve_state, tags=tags)
        return Response()

    @router.post("/wake_up")
    async def wake_up(
        tags: Annotated[list[Literal["weights", "kv_cache"]] | None, Query()] = None,
    ) -> Response:
        """Takes memory again, of all or of what the tags name."""
        await engine.async_wake_up(tags)
        return Response()

    @router.post("/pause")
    async def pause(
        mode: Annotated[Literal["abort", "wait", "keep"] | None, Query()] = None,
        wait_for_inflight_requests: Annotated[bool, Query()] = False,
        clear_cache: Annotated[bool, Query()] = True,
    ) -> dict[str, str]:
        """Pauses generation; see `Engine.pause_generation`. Modes and defaults are vLLM's.

        "keep" is in_place, and keeps the prefix cache too.
        """
        if wait_for_inflight_requests and mode not in (None, "wait"):
            raise InvalidRequestError(
                f"wait_for_inflight_requests=true means mode=wait, got mode={mode}"
            )
        if wait_for_inflight_requests:
            mode = "wait"
        await engine.async_pause_generation("in_place" if mode == "keep" else mode or "abort")
        if clear_cache and mode != "keep":
            flushed = await engine.async_flush_cache()
            if not flushed.success:  # another caller has continued generation
                raise EngineStateError(f"the cache was not cleared: {flushed.error_msg}")
        return {"status": "paused"}

    @router.post("/resume")
    async def resume() -> dict[str, str]:
        """Continues generation."""
        await engine.async_continue_generation()
        return {"status": "resumed"}


def _folder(root: Path | None, given: str) -> Path:
    """A folder below the root, whatever links and dots its name has."""
    if root is None:
        raise EngineStateError(
            "the server was started without weights_root, the folder that weights may come from"
        )
    try:
        folder = (root / given).resolve()
        is_there = folder.is_relative_to(root) and folder.is_dir()
        # A link inside it leads nowhere else either.
        is_there = is_there and all(
            path.resolve().is_relative_to(root) for path in folder.iterdir()
        )
    except (ValueError, OSError):  # no name of a file
        is_there = False
        folder = root
    if not is_there:
        # Says nothing of what else there is on the disk.
        raise InvalidRequestError(
            f"model_path must be a folder below the server's weights_root, got {given!r}"
        )
    return folder


def _update_mode(body: UpdateWeightsFromDisk) -> tuple[Any, bool | None]:
    names = ("mode", "block_generation", "abort_all_requests")
    given = {name: getattr(body, name) for name in names if getattr(body, name)}
    if body.block_generation is False:
        given["block_generation"] = False
    if len(given) > 1:
        raise InvalidRequestError(f"give one of {', '.join(names)}, got {given!r}")
    if body.abort_all_requests:
        return "abort", body.flush_cache
    if body.block_generation is None:
        return body.mode or "retract", body.flush_cache
    if not body.block_generation:
        return "wait", body.flush_cache
    return ("in_place" if body.flush_cache is False else "retract"), body.flush_cache
