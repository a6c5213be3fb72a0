"""Messages and tools, as OpenAI's clients send them and chat templates want them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from sgljax_engine import InvalidRequestError
from sgljax_engine.server.fields import Body, TokenIds


class TextPart(Body):
    """A part of a message; of OpenAI's kinds only text."""

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """The name of a function, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call that an assistant message made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """A message. An assistant's may come back as the server sent it, ids included."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    token_ids: TokenIds | None = Field(None, description="what was sampled; kept as it is")
    prompt_token_ids: TokenIds | None = Field(None, description="its prompt; checked")
    # What clients' objects of replies hold, without a value.
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None


class FunctionDefinition(Body):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = Field(None, description="constrained decoding is missing")


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages for `Engine.apply_chat_template`.

    Arguments of tool calls are objects, as templates write them. A developer is a system message.

    Raises:
        InvalidRequestError: for a message without content, and arguments that are not an object.
    """
    return [_template_message(place, message) for place, message in enumerate(messages)]


def _template_message(place: int, message: Message) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    if content is None and not message.tool_calls:
        # An answer that is all thought has none.
        if message.role != "assistant":
            raise InvalidRequestError(f"messages.{place}.content is missing")
        content = ""
    role = "system" if message.role == "developer" else message.role
    made: dict[str, Any] = {"role": role, "content": content}
    for name in ("name", "tool_call_id", "reasoning_content", "token_ids", "prompt_token_ids"):
        value = getattr(message, name)
        if value is not None:
            made[name] = value
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(place, call)},
            }
            for call in message.tool_calls
        ]
    return made


def _arguments(place: int, call: ToolCall) -> dict[str, Any]:
    text = call.function.arguments
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequestError(
            f"messages.{place}.tool_calls: arguments must be a JSON object, got {text!r}"
        )
    return value
