"""vLLM's routes: sleep, tokenizer, models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field, model_validator
from starlette.responses import PlainTextResponse, Response

from sgljax_engine import Engine, EngineStateError, ForeignField, InvalidRequestError
from sgljax_engine.server.context import ServerContext
from sgljax_engine.server.fields import Body, TokenIds
from sgljax_engine.server.foreign import TOKENIZE
from sgljax_engine.server.limits import TOKENIZE_FACTOR
from sgljax_engine.server.metrics import metrics_text
from sgljax_engine.server.openai.messages import Message, Tool, template_messages
from sgljax_engine.server.openai.models import check_model
from sgljax_engine.server.openai.template import generation_prompt, template_options
from sgljax_engine.server.prepared import prepared
from sgljax_engine.server.routes import AdminRoute, OpenAIRoute


class Tokenize(Body):
    """Body of `/tokenize`: a prompt, or a conversation."""

    foreign: ClassVar[Mapping[str, ForeignField]] = TOKENIZE

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Tokenize:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of prompt and messages")
        return self


class Detokenize(Body):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: TokenIds


def sleep_routes(context: ServerContext) -> APIRouter:
    """Routes of the admin key."""
    router, engine = APIRouter(route_class=AdminRoute), context.engine

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

    return router


def read_routes(context: ServerContext) -> APIRouter:
    """Routes of the data key, whose fields have OpenAI's names."""
    router, engine = APIRouter(route_class=OpenAIRoute), context.engine

    @router.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        """Whether weights or KV cache sleep."""
        return {"is_sleeping": engine.is_sleeping()}

    @router.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        """Whether generation is paused."""
        return {"is_paused": (await engine.async_get_internal_state()).is_paused}

    @router.post("/tokenize")
    async def tokenize(body: Tokenize, request: Request) -> dict[str, Any]:
        """Token ids of a prompt or a conversation."""
        await check_model(context, body.model)
        tokens = await prepared(
            request, context, lambda: _tokens(engine, body), has_template=body.prompt is None
        )
        return {"count": len(tokens), "max_model_len": engine.max_model_len, "tokens": tokens}

    @router.post("/detokenize")
    async def detokenize(body: Detokenize, request: Request) -> dict[str, str]:
        """Text of token ids, special tokens included."""
        await check_model(context, body.model)
        count, limit = len(body.tokens), TOKENIZE_FACTOR * engine.max_model_len
        if count > limit:
            raise InvalidRequestError(f"tokens must be at most {limit} ids, got {count}")
        text = await prepared(
            request, context, lambda: engine.detokenize(body.tokens, skip_special_tokens=None)
        )
        return {"prompt": text}

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Counters for Prometheus."""
        state = await engine.async_get_internal_state()
        content, media_type = metrics_text(state, context)
        return Response(content, media_type=media_type)

    return router


def _tokens(engine: Engine, body: Tokenize) -> list[int]:
    max_tokens = TOKENIZE_FACTOR * engine.max_model_len
    if body.prompt is not None:
        return engine.tokenize(
            body.prompt, add_special_tokens=body.add_special_tokens, max_tokens=max_tokens
        )
    return engine.apply_chat_template(
        template_messages(body.messages or []),
        add_generation_prompt=generation_prompt(body),
        continue_final_message=body.continue_final_message,
        template_options=template_options(body.chat_template_kwargs, body.tools),
        max_tokens=max_tokens,
    )
