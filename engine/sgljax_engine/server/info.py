"""Routes that read: health, the page, models, the engine's state, load, metrics."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import hashlib
import importlib.metadata
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from sgljax_engine import EngineShutdownError, EngineState, InvalidRequestError, SamplingParams
from sgljax_engine.server.context import ServerContext
from sgljax_engine.server.generation import Job, new_rids
from sgljax_engine.server.responses import overloaded
from sgljax_engine.server.routes import DataRoute, OpenRoute

_VERSION = importlib.metadata.version("tunix-sgljax")

_SEED_NAMES = (
    "tree_cache_size",
    "req_to_token_pool_used",
    "cur_batch_is_none",
    "last_batch_is_none",
    "chunked_req_is_none",
    "is_paused",
    "is_sleeping",
)
"""SGLang's names for some of the state."""


def open_routes(context: ServerContext) -> APIRouter:
    """Routes that need no key: health, and the page, which holds no data."""
    router, engine = APIRouter(route_class=OpenRoute), context.engine
    html = resources.files("sgljax_engine.server").joinpath("page.html").read_text("utf-8")
    headers = {
        "Content-Security-Policy": _content_security_policy(html),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    @router.get("/ping")
    @router.post("/ping", operation_id="post_ping")
    @router.get("/health")
    async def health() -> Response:
        """Status 200 while the engine takes calls, also while it is paused or asleep."""
        if not engine.is_running:
            raise EngineShutdownError("the engine was shut down")
        if context.generation.is_draining:
            raise overloaded("the server is shutting down")
        refusal = context.replica.refusal()
        if refusal is not None:
            code, problem = refusal
            raise overloaded(problem, code)
        return Response()

    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        """A live picture of the engine."""
        return HTMLResponse(html, headers=headers)

    return router


def _content_security_policy(html: str) -> str:
    """Allows the page's own script and style, by their hashes, and requests to this server."""

    def source(tag: str) -> str:
        text = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digests = [hashlib.sha256(each.encode()).digest() for each in text]
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {source('script')}; style-src {source('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def info_routes(context: ServerContext) -> APIRouter:
    router = APIRouter(route_class=DataRoute)
    _add_model_routes(router, context)
    _add_state_routes(router, context)
    return router


def _add_model_routes(router: APIRouter, context: ServerContext) -> None:
    engine, config = context.engine, context.config

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "tunix-sgljax",
            "max_model_len": engine.max_model_len,
            "parent": None if name == config.model_name else config.model_name,
        }

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model, and the adapters that are loaded: each is a name for `model`."""
        return {"object": "list", "data": [card(name) for name in await context.served_names()]}

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """The model or an adapter by its name."""
        await context.check_model(model)
        return card(model)

    @router.get("/version")
    async def version() -> dict[str, str]:
        """The version of this package."""
        return {"version": _VERSION}

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

    @router.get("/weight_version")
    @router.get("/get_weight_version")
    async def get_weight_version() -> dict[str, Any]:
        """Versions of the serving weights, with its label, and of those staged and in the store."""
        replica, version = context.replica, engine.weight_version
        follower = replica.follower
        return {
            "weight_version": version,
            "label": context.version_labels.get(version),
            "replica_id": replica.id,
            "is_quarantined": replica.is_quarantined,
            "staged_version": None if follower is None else follower.staged_version,
            "store_version": None if follower is None else await replica.ask(follower.newest),
        }


def _add_state_routes(router: APIRouter, context: ServerContext) -> None:
    engine, config = context.engine, context.config

    @router.get("/health_generate")
    async def health_generate(request: Request) -> Response:
        """Status 200 once a token was generated; 503 if generation is halted too long."""
        params = SamplingParams(max_new_tokens=1, temperature=0.0)
        rids = new_rids(1, "health-")
        job = Job(input_ids=[[0]], sampling_params=[params], rids=rids)
        await context.generation.generate(request, job)
        return Response()

    @router.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        """Whether weights or KV cache sleep."""
        return {"is_sleeping": engine.is_sleeping()}

    @router.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        """Whether generation is paused."""
        return {"is_paused": (await engine.async_get_internal_state()).is_paused}

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def get_server_info() -> JSONResponse:
        """Limits of the server, and the state of the engine."""
        state = await engine.async_get_internal_state()
        limits = ("max_requests", "max_body_bytes", "halt_timeout_s")
        named = {name: getattr(state, name) for name in _SEED_NAMES}
        return JSONResponse(
            {
                "version": _VERSION,
                "model_name": config.model_name,
                "served_model_name": config.model_name,
                "replica_id": context.replica.id,
                "limits": {name: getattr(config, name) for name in limits},
                "num_open_samples": context.generation.num_open,
                "internal_states": [dataclasses.asdict(state) | named],
            }
        )

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
            "version": _VERSION,
            "loads": [_load(states[rank], rank) for rank in ranks],
        }

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Counters for Prometheus."""
        state, registry = await engine.async_get_internal_state(), CollectorRegistry()
        labels = {"model_name": config.model_name, "replica_id": context.replica.id}
        registry.register(_Metrics(state, context.generation.num_open, labels))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


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


_GAUGES = {
    "num_requests_running": ("running_batch_size", "Requests that hold KV pages."),
    "num_requests_waiting": ("waiting_queue_size", "Requests that wait."),
    "weight_version": ("weight_version", "Version of the serving weights."),
    "is_paused": ("is_paused", "1 while generation is paused."),
    "is_sleeping": ("is_sleeping", "1 while weights or KV cache sleep."),
}
_TOTALS = {
    "requests": ("num_requests", "Requests that were added."),
    "request_success": ("num_finished", "Requests that ended."),
    "requests_aborted": ("num_aborted", "Requests that were aborted."),
    "prompt_tokens": ("num_prefill_tokens", "Tokens prefilled."),
    "prefix_cache_hits": ("num_cached_tokens", "Tokens from the prefix cache."),
    "generation_tokens": ("num_output_tokens", "Tokens generated."),
    "spec_decode_num_draft_tokens": ("num_draft_tokens", "Draft tokens verified."),
    "spec_decode_num_accepted_tokens": ("num_accepted_tokens", "Draft tokens that were right."),
    "num_preemptions": ("num_retractions", "Requests that lost their pages."),
    "weight_updates": ("num_weight_updates", "Weight updates."),
    "pauses": ("num_pauses", "Pauses of generation."),
    "pause_seconds": ("pause_s", "Seconds of pauses."),
    "sleeps": ("num_sleeps", "Times asleep."),
    "failed_steps": ("num_failed_steps", "Steps that failed."),
    "nonfinite_requests": (
        "num_nonfinite_requests",
        "Requests that failed since their logits were NaN or infinite.",
    ),
    "prefill_seconds": ("prefill_s", "Seconds of prefill."),
    "decode_seconds": ("decode_s", "Seconds of decode."),
}
_SUMMARIES = {
    "time_to_first_token_seconds": (
        "num_first_tokens",
        "time_to_first_token_s",
        "Seconds to the first token.",
    ),
    "e2e_request_latency_seconds": ("num_finished", "e2e_latency_s", "Seconds to the end."),
}


class _Metrics(Collector):
    """A state for Prometheus; names follow vLLM's, with a prefix of their own."""

    def __init__(self, state: EngineState, num_open: int, labels: Mapping[str, str]) -> None:
        self._state, self._num_open, self._labels = state, num_open, dict(labels)

    def collect(self) -> Iterator[Metric]:
        state, counters = self._state, self._state.counters
        used = 1 - state.available_kv_tokens / state.total_kv_tokens
        yield self._gauge("num_open_samples", "Samples of HTTP requests.", self._num_open)
        yield self._gauge("kv_cache_usage_perc", "Part of the KV pages in use, in [0, 1].", used)
        for name, (field, text) in _GAUGES.items():
            yield self._gauge(name, text, getattr(state, field))
        for name, (field, text) in _TOTALS.items():
            yield self._metric(name, text, "counter", {"_total": getattr(counters, field)})
        for name, (count, seconds, text) in _SUMMARIES.items():
            values = {"_count": getattr(counters, count), "_sum": getattr(counters, seconds)}
            yield self._metric(name, text, "summary", values)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._metric(name, text, "gauge", {"": value})

    def _metric(self, name: str, text: str, kind: str, values: Mapping[str, float]) -> Metric:
        metric = Metric(f"sgljax:{name}", text, kind)
        for end, value in values.items():
            metric.add_sample(f"sgljax:{name}{end}", self._labels, value)
        return metric
