"""OpenAI's `/v1/chat/completions`."""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from sgljax_engine import MAX_TOP_LOGPROBS, ForeignField, InvalidRequestError
from sgljax_engine.replies.formats import ReplyReading
from sgljax_engine.replies.parser import ResponseParser
from sgljax_engine.replies.values import Call
from sgljax_engine.server import openai
from sgljax_engine.server.context import ServerContext
from sgljax_engine.server.fields import (
    CHAT,
    NO_FORCED_CALL,
    NO_GRAMMAR,
    RESPONSE_FORMAT,
    Body,
    FirstErrorOnly,
)
from sgljax_engine.server.generation import Job, PieceStream, new_rids
from sgljax_engine.server.messages import Message, Tool, conversation_tokens
from sgljax_engine.server.openai import OpenAIRequest, Output
from sgljax_engine.server.responses import event
from sgljax_engine.server.routes import OpenAIRoute

_log = logging.getLogger(__name__)


class ResponseFormat(Body):
    """The only format there is."""

    foreign: ClassVar[Mapping[str, ForeignField]] = RESPONSE_FORMAT
    only: ClassVar[Mapping[str, tuple[Sequence[str], str]]] = {"type": (("text",), NO_GRAMMAR)}

    type: Literal["text"]


class ChatRequest(OpenAIRequest):
    foreign: ClassVar[Mapping[str, ForeignField]] = CHAT
    only: ClassVar[Mapping[str, tuple[Sequence[str], str]]] = {
        "tool_choice": (("none", "auto"), NO_FORCED_CALL)
    }

    messages: Annotated[list[Message], FirstErrorOnly()] = Field(
        min_length=1, description="the conversation; content is text or parts of text"
    )
    max_completion_tokens: int | None = Field(None, ge=1, description="the same as max_tokens")
    logprobs: bool = Field(False, description="log-probs of the output's tokens")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="log-probs of so many likely tokens too"
    )
    tools: list[Tool] | None = Field(None, description="functions that the model may call")
    tool_choice: Literal["none", "auto"] | None = Field(
        None, description='"auto" or "none": the model cannot be made to call a tool'
    )
    parallel_tool_calls: bool | None = Field(
        None, description="false gives back the first call of an answer alone, as vLLM does"
    )
    response_format: ResponseFormat | None = Field(
        None, description='`{"type": "text"}`: constrained decoding is not implemented'
    )
    metadata: dict[str, str] | None = Field(None, description="accepted and not used")
    prompt_cache_key: str | None = Field(None, description="accepted and not used")
    safety_identifier: str | None = Field(None, description="accepted and not used")
    add_generation_prompt: bool | None = Field(
        None,
        description="end the prompt with the start of the assistant's answer; by default true "
        "unless the last message is continued",
    )
    continue_final_message: bool = Field(
        False, description="go on with the last message, an assistant's that was cut"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables of the chat template, such as `enable_thinking`"
    )
    separate_reasoning: bool = Field(True, description="split thoughts off the content")


def chat_routes(context: ServerContext) -> APIRouter:
    router = APIRouter(route_class=OpenAIRoute)

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answers a conversation."""
        return await context.answer(
            request,
            body.model,
            lambda: _ChatAnswer(context, body),
            stream=body.stream,
            has_template=True,
        )

    return router


@functools.cache  # once is enough
def _warn_of_strict() -> None:
    _log.warning("strict=true of tools has no effect: arguments are not constrained to the schema")


class _ChatAnswer:
    def __init__(self, context: ServerContext, body: ChatRequest) -> None:
        engine = context.engine
        self._body = body
        self._texts = context.token_texts
        self._model = body.model or context.config.model_name
        self._id = openai.reply_id("chatcmpl")
        tools = body.tools if body.tools and body.tool_choice != "none" else None
        schemas = None
        if tools:
            schemas = {t.function.name: t.function.parameters or {} for t in tools}
            if any(tool.function.strict for tool in tools):
                _warn_of_strict()
        self._reading = ReplyReading(
            engine,
            schemas,
            thinks=body.separate_reasoning,
            skips_special_tokens=body.skip_special_tokens is not False,
        )
        self._prompt_ids = conversation_tokens(
            engine,
            body.messages,
            tools,
            options=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            max_tokens=engine.max_model_len,
        )
        self._prompt = engine.detokenize(self._prompt_ids, skip_special_tokens=None)
        given = (body.max_tokens, body.max_completion_tokens)
        if None not in given and given[0] != given[1]:
            raise InvalidRequestError(
                f"max_tokens={given[0]} contradicts max_completion_tokens={given[1]}"
            )
        max_tokens = next((value for value in given if value is not None), None)
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequestError(f"top_logprobs={body.top_logprobs} needs logprobs=true")
        logprobs: dict[str, Any] = {}
        if body.logprobs:
            logprobs = {"return_logprob": True, "top_logprobs_num": body.top_logprobs or 0}
        if max_tokens == 0:
            raise InvalidRequestError("max_tokens must be >= 1, got 0")
        params = openai.request_params(
            engine, body, len(self._prompt_ids), max_tokens, text_options=self._text_options()
        )
        self._num_samples = params.n
        self.job = Job(
            input_ids=[self._prompt_ids],
            sampling_params=[params],
            rids=new_rids(1, f"{self._id}-"),
            logprobs=logprobs,
            lora=[openai.adapter(context, body)],
        )

    def _text_options(self) -> dict[str, Any]:
        """A message stands alone, and what a client says of its end is said of the content."""
        options: dict[str, Any] = {"decode_behind_prompt": self._body.continue_final_message}
        options["reasoning_tags"] = self._parser().stop_tags()
        if self._reading.needs_special_tokens:
            options["skip_special_tokens"] = False
        return options

    def _parser(self) -> ResponseParser:
        return self._reading.parser(
            self._prompt, max_calls=1 if self._body.parallel_tool_calls is False else None
        )

    def answer(self, outputs: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **openai.head("chat.completion", self._id, self._model),
            "choices": [self._choice(index, output) for index, output in enumerate(outputs)],
            "usage": openai.usage(outputs, self._num_samples),
            **self._prompt_fields(),
        }

    def _prompt_fields(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompt_ids} if self._body.return_token_ids else {}

    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        parser = self._parser()
        reasoning, content = parser.feed(output["text"]) + parser.end()
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        if parser.calls:
            message["content"] = content or None
            message["tool_calls"] = [call.to_dict(i) for i, call in enumerate(parser.calls)]
        ids = openai.id_fields(self._body, output)
        if self._body.return_token_ids:
            # A client that sends the message back, as it is, keeps the tokens.
            message |= {"token_ids": ids["token_ids"], **self._prompt_fields()}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(output),
            **_finish(output, parser.calls),
            **ids,
        }

    async def events(self, pieces: PieceStream) -> AsyncIterator[str]:
        head = openai.head("chat.completion.chunk", self._id, self._model)
        parsers = [self._parser() for _ in range(self._num_samples)]
        for index in range(self._num_samples):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield event({**head, "choices": [choice], **self._prompt_fields()})
        last: dict[int, Output] = {}
        async for piece in pieces:
            index = piece["index"]
            last[index] = piece
            yield event({**head, "choices": [self._chunk(index, piece, parsers[index])]})
        for each in openai.last_events(self._body, head, last, self._num_samples):
            yield each

    def _chunk(self, index: int, piece: Output, parser: ResponseParser) -> dict[str, Any]:
        num_calls = len(parser.calls)
        new = parser.feed(piece["text"])
        if piece["meta_info"]["finish_reason"] is not None:
            new += parser.end()
        delta: dict[str, Any] = {}
        if new.content:
            delta["content"] = new.content
        if new.reasoning:
            delta["reasoning_content"] = new.reasoning
        if len(parser.calls) > num_calls:
            found = enumerate(parser.calls[num_calls:], num_calls)
            delta["tool_calls"] = [call.to_dict(number) for number, call in found]
        return {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(piece),
            **_finish(piece, parser.calls),
            **openai.id_fields(self._body, piece),
        }

    def _logprobs(self, output: Output) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        meta = output["meta_info"]
        entries = meta["output_token_logprobs"]
        tops = meta.get("output_top_logprobs") or [[]] * len(entries)
        content = [
            {**self._entry(entry), "top_logprobs": [self._entry(each) for each in top]}
            for entry, top in zip(entries, tops, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, entry: Any) -> dict[str, Any]:
        logprob, token, _ = entry
        known = self._texts.bytes_of(token)
        name = openai.token_name(self._body, self._texts, token)
        return {"token": name, "logprob": logprob, "bytes": known and list(known)}


def _finish(output: Output, calls: Sequence[Call]) -> dict[str, Any]:
    fields = openai.finish_fields(output)
    if calls and fields["finish_reason"] == "stop":
        fields["finish_reason"] = "tool_calls"
    return fields
