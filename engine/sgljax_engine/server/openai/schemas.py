"""Bodies of OpenAI's routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from sgljax_engine import MAX_TOP_LOGPROBS, ForeignField
from sgljax_engine.server.fields import (
    Body,
    FirstErrorOnly,
    ListsOfTokenIds,
    SamplingFields,
    Texts,
    TokenIds,
)
from sgljax_engine.server.foreign import (
    CHAT,
    COMPLETION,
    NO_FORCED_CALL,
    NO_GRAMMAR,
    RESPONSE_FORMAT,
    STREAM_OPTIONS,
)
from sgljax_engine.server.openai.messages import Message, Tool


class StreamOptions(Body):
    """Options for the end of a stream."""

    foreign: ClassVar[Mapping[str, ForeignField]] = STREAM_OPTIONS

    include_usage: bool = False


class ResponseFormat(Body):
    """The only format there is."""

    foreign: ClassVar[Mapping[str, ForeignField]] = RESPONSE_FORMAT
    only: ClassVar[Mapping[str, tuple[Sequence[str], str]]] = {"type": (("text",), NO_GRAMMAR)}

    type: Literal["text"]


class OpenAIRequest(SamplingFields):
    """Fields that both routes take."""

    empty_is_null: ClassVar[frozenset[str]] = frozenset({"model", "stop"})

    model: str | None = Field(None, description="the model's name, or a loaded adapter's")
    stream: bool = Field(False, description="answer with server-sent events")
    stream_options: StreamOptions | None = Field(
        None, description="`include_usage`: the last event has the counts of tokens"
    )
    max_tokens: int | None = Field(
        None,
        ge=0,
        description="most tokens to sample; by default 16, in chat as many as the context holds",
    )
    min_tokens: int | None = Field(
        None, ge=0, description="before there are so many, nothing ends the output"
    )
    user: str | None = Field(None, description="accepted and not used")
    return_token_ids: bool = Field(False, description="ids of the prompt and of the output")
    return_weight_versions: bool = Field(False, description="the version of each output token")
    return_tokens_as_token_ids: bool = Field(
        False, description="log-probs name a token `token_id:5`, not by its text"
    )


class CompletionRequest(OpenAIRequest):
    """Body of `/v1/completions`."""

    foreign: ClassVar[Mapping[str, ForeignField]] = COMPLETION

    prompt: str | TokenIds | Texts | ListsOfTokenIds = Field(
        description="text or token ids, one prompt or a list of them"
    )
    add_special_tokens: bool = Field(
        True, description="tokenize a text with BOS; false for a text that has it"
    )
    echo: bool = Field(False, description="put the prompt before the text, and into the log-probs")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="log-probs, and of so many likely tokens"
    )


class ChatRequest(OpenAIRequest):
    """Body of `/v1/chat/completions`."""

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
