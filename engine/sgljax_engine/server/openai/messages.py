"""Messages and tools, as OpenAI's clients send them and chat templates want them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from sgljax_engine import ForeignField, InvalidRequestError
from sgljax_engine.server.fields import Body, TokenIds
from sgljax_engine.server.foreign import MESSAGE, TEXT_ONLY, TEXT_PART, TOOL, TOOL_CALL
from sgljax_engine.server.openai.response_values import read_json


class TextPart(Body):
    """A part of a message; of OpenAI's kinds only text."""

    foreign: ClassVar[Mapping[str, ForeignField]] = TEXT_PART
    only: ClassVar[Mapping[str, tuple[Sequence[str], str]]] = {"type": (("text",), TEXT_ONLY)}

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """The name of a function, and its arguments as JSON, or whatever a model wrote there."""

    name: str
    arguments: Any = None


class ToolCall(Body):
    """A call that an assistant message made."""

    foreign: ClassVar[Mapping[str, ForeignField]] = TOOL_CALL

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


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

    def text(self) -> str:
        """The content; empty without any."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class FunctionDefinition(Body):
    """A function that the model may call."""

    foreign: ClassVar[Mapping[str, ForeignField]] = TOOL

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="accepted and not enforced")


class Tool(Body):
    """A tool that the model may call."""

    foreign: ClassVar[Mapping[str, ForeignField]] = TOOL

    type: Literal["function"]
    function: FunctionDefinition


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages for `Engine.apply_chat_template`.

    Arguments of tool calls are objects, as templates write them; what is no object is given to the
    template as it came. A developer is a system message.

    Raises:
        InvalidRequestError: for a message without content.
    """
    return [_template_message(index, message) for index, message in enumerate(messages)]


def _template_message(index: int, message: Message) -> dict[str, Any]:
    content = None if message.content is None else message.text()
    if content is None and not message.tool_calls:
        # An answer that is all thought has none.
        if message.role != "assistant":
            raise InvalidRequestError(f"messages.{index}.content is missing")
        content = ""
    role = "system" if message.role == "developer" else message.role
    made: dict[str, Any] = {"role": role, "content": content}
    thoughts = {message.reasoning, message.reasoning_content} - {None}
    if len(thoughts) > 1:
        raise InvalidRequestError(f"messages.{index}.reasoning contradicts its reasoning_content")
    made["reasoning_content"] = next(iter(thoughts), None)
    for name in ("name", "tool_call_id", "token_ids", "prompt_token_ids"):
        made[name] = getattr(message, name)
    made = {name: value for name, value in made.items() if value is not None or name == "content"}
    if message.tool_calls:
        is_rendered = message.token_ids is None
        made["tool_calls"] = [
            _template_call(call, is_rendered=is_rendered) for call in message.tool_calls
        ]
    return made


def _template_call(call: ToolCall, *, is_rendered: bool) -> dict[str, Any]:
    arguments = _arguments(call, is_rendered=is_rendered)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(call: ToolCall, *, is_rendered: bool) -> Any:
    """The value that the template gets: the parsed object, or the text if it is none.

    One bad call must not end a conversation. With the message's ids it is not even read.
    """
    given = call.function.arguments
    value = given
    if isinstance(given, str):
        try:
            value = read_json(given) if given.strip() else None
        except ValueError:
            value = given
    if isinstance(value, dict):
        return value
    return given if is_rendered and value is not None else {}
