"""Bodies of OpenAI's routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from sgljax_engine import MAX_TOP_LOGPROBS
from sgljax_engine.server.fields import (
    Body,
    FirstErrorOnly,
    ListsOfTokenIds,
    SamplingFields,
    Texts,
    TokenIds,
)
from sgljax_engine.server.openai.messages import Message, Tool


class StreamOptions(Body):
    """What a stream says at its end."""

    include_usage: bool = False


class ResponseFormat(Body):
    """The only format there is."""

    type: Literal["text"]


class OpenAIRequest(SamplingFields):
    """What both routes take."""

    model: str | None = Field(None, description="the model's name, or a loaded adapter's")
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=0)
    min_tokens: int | None = Field(None, ge=0)
    user: str | None = Field(None, description="not used")
    return_token_ids: bool = Field(False, description="ids of the prompt and of the output")
    return_weight_versions: bool = Field(False, description="the version of each output token")


class CompletionRequest(OpenAIRequest):
    """Body of `/v1/completions`."""

    prompt: str | TokenIds | Texts | ListsOfTokenIds
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)


class ChatRequest(OpenAIRequest):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], FirstErrorOnly()] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto"] | None = Field(
        None, description="the model cannot be made to call a tool"
    )
    parallel_tool_calls: bool | None = Field(None, description="true; false is not enforced")
    response_format: ResponseFormat | None = None
    metadata: dict[str, str] | None = Field(None, description="not used")
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    separate_reasoning: bool = Field(True, description="split thoughts off the content")
