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
from sgljax_engine.server.fields import CHAT, FirstErrorOnly
from sgljax_engine.server.generation import Job, PieceStream, new_rids
from sgljax_engine.server.messages import (
    Message,
    Tool,
    ToolChoice,
    conversation_tokens,
    tools_to_call,
)
from sgljax_engine.server.openai import OpenAIRequest, Output
from sgljax_engine.server.responses import event
from sgljax_engine.server.routes import OpenAIRoute

_log = logging.getLogger(__name__)


class ChatRequest(OpenAIRequest):
    foreign: ClassVar[Mapping[str, ForeignField]] = CHAT

    messages: Annotated[list[Message], FirstErrorOnly()] = Field(
        min_length=1, description="the conversation; content is text or parts of text"
    )
    max_completion_tokens: int | None = Field(None, ge=1, description="the same as max_tokens")
    logprobs: bool = Field(False, description="log-probs of the output's tokens")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="log-probs of so many likely tokens too"
    )
    tools: list[Tool] | None = Field(None, description="functions that the model may call")
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = Field(
        None, description='"auto", "none", "required" or a function: then it is called'
    )
    parallel_tool_calls: bool | None = Field(
        None, description="false gives at most one call: an answer's first"
    )
    max_thinking_tokens: int | None = Field(
        None, ge=0, description="most tokens of thoughts; then they are closed"
    )
    thinking_token_budget: int | None = Field(
        None, ge=-1, description="the same, as vLLM calls it; -1 for no bound"
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
    _log.warning(
        "strict=true of tools has no effect: nothing tells the model's tool calls from content; "
        'tool_choice="required" constrains them'
    )


class _ChatAnswer:
    def __init__(self, context: ServerContext, body: ChatRequest) -> None:
        engine = context.engine
        self._body = body
        self._texts = context.token_texts
        self._model = body.model or context.config.model_name
        self._id = openai.reply_id("chatcmpl")
        tools = body.tools if body.tools and body.tool_choice != "none" else None
        self._reading = ReplyReading(
            engine,
            _schemas(tools) if tools else None,
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
        self._outputs = self._structured_outputs(tools or [])
        max_tokens = _agreed(body, "max_tokens", "max_completion_tokens")
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

    def _structured_outputs(self, tools: Sequence[Tool]) -> dict[str, Any] | None:
        """What the answer may be: content, calls or both."""
        body, grammars = self._body, self._reading.grammars
        name, outputs = openai.outputs_of(body)
        chosen = tools_to_call(body.tool_choice, tools)
        strict = [tool for tool in tools if tool.function.strict]
        if chosen and outputs is not None:
            raise InvalidRequestError(f"{name} contradicts tool_choice: the answer is a call")
        if chosen or (strict and outputs is None):
            name = "tool_choice" if chosen else "strict=true of tools"
            openai.check_free_end(body, name)
        elif outputs is None:
            return None
        if body.continue_final_message:
            raise InvalidRequestError(
                f"continue_final_message=true goes without {name}, which concerns whole answers"
            )
        is_one = body.parallel_tool_calls is False
        if chosen:
            is_one = is_one or isinstance(body.tool_choice, ToolChoice)
            return grammars.calls(_schemas(chosen), is_one=is_one)
        if not tools:
            return grammars.content(outputs or {})
        schemas = {**{name: {"type": "object"} for name in _schemas(tools)}, **_schemas(strict)}
        found = grammars.mixed(schemas, outputs, is_one=is_one)
        if found is None and outputs is not None:
            raise InvalidRequestError(
                f"{name} goes without tools: nothing tells the model's tool calls from content; "
                'give tool_choice="none" or "required"'
            )
        if found is None:
            _warn_of_strict()
        return found

    def _text_options(self) -> dict[str, Any]:
        """A message stands alone, and what a client says of its end is said of the content."""
        body = self._body
        options: dict[str, Any] = {"decode_behind_prompt": body.continue_final_message}
        options["structured_outputs"] = self._outputs
        most = self._max_thinking_tokens()
        # Thoughts are free, and bounded, even where they stay in the content.
        is_guided = most is not None or self._outputs is not None
        tags = self._reading.thought_tags(self._prompt, in_content=is_guided)
        options["reasoning_tags"] = tags
        options["max_thinking_tokens"] = most if tags is not None else None
        if self._reading.needs_special_tokens:
            options["skip_special_tokens"] = False
        return options

    def _max_thinking_tokens(self) -> int | None:
        names = "max_thinking_tokens", "thinking_token_budget"
        most = _agreed(self._body, *names)
        if most in (None, -1):
            return None
        if not self._reading.has_thoughts:
            name = names[self._body.max_thinking_tokens is None]
            raise InvalidRequestError(
                f"{name}={most} needs a chat template with known marks of thoughts, and the "
                "model's has none"
            )
        return most

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


def _agreed(body: ChatRequest, name: str, other: str) -> int | None:
    """The value of two fields that mean the same."""
    given, also = getattr(body, name), getattr(body, other)
    if None not in (given, also) and given != also:
        raise InvalidRequestError(f"{name}={given} contradicts {other}={also}")
    return also if given is None else given


def _schemas(tools: Sequence[Tool]) -> dict[str, dict[str, Any]]:
    return {tool.function.name: tool.function.parameters or {} for tool in tools}


def _finish(output: Output, calls: Sequence[Call]) -> dict[str, Any]:
    fields = openai.finish_fields(output)
    if calls and fields["finish_reason"] == "stop":
        fields["finish_reason"] = "tool_calls"
    return fields
