"""Conversations, as OpenAI's clients send them and chat templates want them; tokenizer routes."""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import Field, model_validator

from sgljax_engine import Engine, ForeignField, InvalidRequestError
from sgljax_engine.replies.values import read_json
from sgljax_engine.server.body import TOKENIZE_FACTOR
from sgljax_engine.server.context import ServerContext
from sgljax_engine.server.fields import (
    MESSAGE,
    TEXT_ONLY,
    TEXT_PART,
    TOKENIZE,
    TOOL,
    TOOL_CALL,
    TOOL_CHOICE,
    Body,
    TokenIds,
)
from sgljax_engine.server.routes import OpenAIRoute


class TextPart(Body):
    foreign: ClassVar[Mapping[str, ForeignField]] = TEXT_PART
    only: ClassVar[Mapping[str, tuple[Sequence[str], str]]] = {"type": (("text",), TEXT_ONLY)}

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """The name of a function, and its arguments as JSON, or whatever a model wrote there."""

    name: str
    arguments: Any = None


class ToolCall(Body):
    foreign: ClassVar[Mapping[str, ForeignField]] = TOOL_CALL

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None

    def for_template(self, *, is_rendered: bool) -> dict[str, Any]:
        """The call with parsed arguments; with its text of them if it is no object.

        One bad call must not end a conversation. What is not rendered is not even read.
        """
        given = value = self.function.arguments
        if isinstance(given, str):
            with contextlib.suppress(ValueError):
                value = read_json(given) if given.strip() else None
        if not isinstance(value, dict):
            value = given if is_rendered and value is not None else {}
        function = {"name": self.function.name, "arguments": value}
        return {"id": self.id, "type": "function", "function": function}


class Message(Body):
    """A message. An assistant's may come back as the server sent it, ids included."""

    foreign: ClassVar[Mapping[str, ForeignField]] = MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="vLLM's other name of reasoning_content")
    token_ids: TokenIds | None = Field(None, description="what was sampled; kept as it is")
    prompt_token_ids: TokenIds | None = Field(None, description="its prompt; checked")

    def for_template(self, index: int) -> dict[str, Any]:
        """The message for `Engine.apply_chat_template`. A developer is a system message."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        if content is None and not self.tool_calls:
            # An answer that is all thought has none.
            if self.role != "assistant":
                raise InvalidRequestError(f"messages.{index}.content is missing")
            content = ""
        thoughts = {self.reasoning, self.reasoning_content} - {None}
        if len(thoughts) > 1:
            raise InvalidRequestError(
                f"messages.{index}.reasoning contradicts its reasoning_content"
            )
        made: dict[str, Any] = {"reasoning_content": next(iter(thoughts), None)}
        for name in ("name", "tool_call_id", "token_ids", "prompt_token_ids"):
            made[name] = getattr(self, name)
        made = {name: value for name, value in made.items() if value is not None}
        role = "system" if self.role == "developer" else self.role
        made = {"role": role, "content": content, **made}
        if self.tool_calls:
            is_rendered = self.token_ids is None
            calls = [call.for_template(is_rendered=is_rendered) for call in self.tool_calls]
            made["tool_calls"] = calls
        return made


class FunctionDefinition(Body):
    foreign: ClassVar[Mapping[str, ForeignField]] = TOOL

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="arguments must follow `parameters`")


class Tool(Body):
    foreign: ClassVar[Mapping[str, ForeignField]] = TOOL

    type: Literal["function"]
    function: FunctionDefinition


class ToolName(Body):
    name: str


class ToolChoice(Body):
    """The tool that must be called."""

    foreign: ClassVar[Mapping[str, ForeignField]] = TOOL_CHOICE
    only: ClassVar[Mapping[str, tuple[Sequence[str], str]]] = {
        "type": (("function",), "tools are functions")
    }

    type: Literal["function"]
    function: ToolName


def tools_to_call(choice: str | ToolChoice | None, tools: Sequence[Tool]) -> Sequence[Tool]:
    """The tools of which one must be called; none if none must.

    Raises InvalidRequestError for a choice of what is not there.
    """
    if choice in (None, "none", "auto"):
        return ()
    if not tools:
        raise InvalidRequestError("tool_choice needs tools to call, got none")
    if not isinstance(choice, ToolChoice):
        return tools
    found = [tool for tool in tools if tool.function.name == choice.function.name]
    if not found:
        names = reprlib.repr([tool.function.name for tool in tools])
        raise InvalidRequestError(
            f"tool_choice.function.name must be one of {names}, got {choice.function.name!r}"
        )
    return found[:1]


def conversation_tokens(
    engine: Engine,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    *,
    options: Mapping[str, Any] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    max_tokens: int,
) -> list[int]:
    """Token ids of a conversation; see `Engine.apply_chat_template`.

    `options` are the client's variables of the template. Unless the client says it, a generation
    prompt is added if the final message is not continued.
    """
    given = dict(options or {})
    if tools:
        if "tools" in given:
            raise InvalidRequestError("chat_template_kwargs must not set 'tools'; give tools")
        # `strict` is for servers: no model was trained to read it.
        left_out = {"function": {"strict"}}
        given["tools"] = [t.model_dump(exclude_none=True, exclude=left_out) for t in tools]
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    return engine.apply_chat_template(
        [message.for_template(index) for index, message in enumerate(messages)],
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        template_options=given,
        max_tokens=max_tokens,
    )


class Tokenize(Body):
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

    def tokens(self, engine: Engine) -> list[int]:
        max_tokens = TOKENIZE_FACTOR * engine.max_model_len
        if self.prompt is not None:
            return engine.tokenize(
                self.prompt, add_special_tokens=self.add_special_tokens, max_tokens=max_tokens
            )
        return conversation_tokens(
            engine,
            self.messages or [],
            self.tools,
            options=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            max_tokens=max_tokens,
        )


class Detokenize(Body):
    model: str | None = None
    tokens: TokenIds


def tokenizer_routes(context: ServerContext) -> APIRouter:
    router, engine = APIRouter(route_class=OpenAIRoute), context.engine

    @router.post("/tokenize")
    async def tokenize(body: Tokenize, request: Request) -> dict[str, Any]:
        """Token ids of a prompt or a conversation."""
        await context.check_model(body.model)
        tokens = await context.prepared(
            request, lambda: body.tokens(engine), has_template=body.prompt is None
        )
        return {"count": len(tokens), "max_model_len": engine.max_model_len, "tokens": tokens}

    @router.post("/detokenize")
    async def detokenize(body: Detokenize, request: Request) -> dict[str, str]:
        """Text of token ids, special tokens included."""
        await context.check_model(body.model)
        count, limit = len(body.tokens), TOKENIZE_FACTOR * engine.max_model_len
        if count > limit:
            raise InvalidRequestError(f"tokens must be at most {limit} ids, got {count}")
        text = await context.prepared(
            request, lambda: engine.detokenize(body.tokens, skip_special_tokens=None)
        )
        return {"prompt": text}

    return router
