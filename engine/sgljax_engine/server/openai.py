"""What OpenAI's routes share: fields of their requests, and parts of their replies."""

from __future__ import annotations

import itertools
import reprlib
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from sgljax_engine import Engine, ForeignField, InvalidRequestError, SamplingParams
from sgljax_engine.replies.lark import check_outputs
from sgljax_engine.server.context import ServerContext, TokenTexts
from sgljax_engine.server.fields import RESPONSE_FORMAT, STREAM_OPTIONS, Body, SamplingFields
from sgljax_engine.server.responses import DONE, event
from sgljax_engine.structured_outputs import checked_outputs

Output = Mapping[str, Any]
"""An output, or a piece of one, as of `RequestOutput.to_dict`."""


class StreamOptions(Body):
    foreign: ClassVar[Mapping[str, ForeignField]] = STREAM_OPTIONS

    include_usage: bool = False


class JsonSchema(Body):
    """`strict` changes nothing: the schema always holds."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    foreign: ClassVar[Mapping[str, ForeignField]] = RESPONSE_FORMAT
    only: ClassVar[Mapping[str, tuple[Sequence[str], str]]] = {
        "type": (("text", "json_object", "json_schema"), "there is no grammar for it")
    }

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def outputs(self) -> dict[str, Any] | None:
        """As `structured_outputs`."""
        if (self.json_schema is None) == (self.type == "json_schema"):
            needs = "needs" if self.json_schema is None else "goes without"
            raise InvalidRequestError(f"response_format.type={self.type!r} {needs} json_schema")
        if self.json_schema is None:
            return {"json_object": True} if self.type == "json_object" else None
        schema = self.json_schema.schema_
        return {"json_object": True} if schema is None else {"json": schema}


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
    response_format: ResponseFormat | None = Field(
        None, description="text, json_object, or json_schema with a schema that always holds"
    )
    user: str | None = Field(None, description="accepted and not used")
    return_token_ids: bool = Field(False, description="ids of the prompt and of the output")
    return_weight_versions: bool = Field(False, description="the version of each output token")
    return_tokens_as_token_ids: bool = Field(
        False, description="log-probs name a token `token_id:5`, not by its text"
    )


def head(kind: str, rid: str, model: str) -> dict[str, Any]:
    return {"id": rid, "object": kind, "created": int(time.time()), "model": model}


def reply_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def usage(outputs: Iterable[Output], num_samples: int) -> dict[str, Any]:
    """Token counts; a prompt with several samples counts once."""
    metas = [output["meta_info"] for output in outputs]
    prompts = sum(meta["prompt_tokens"] for meta in metas[::num_samples])
    cached = sum(meta["cached_tokens"] for meta in metas[::num_samples])
    completion = sum(meta["completion_tokens"] for meta in metas)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": completion,
        "total_tokens": prompts + completion,
        "prompt_tokens_details": {"cached_tokens": min(cached, prompts)},
    }


def last_events(
    body: OpenAIRequest, head: Mapping[str, Any], last: Mapping[int, Output], num_samples: int
) -> Iterator[str]:
    """The end of a stream of the last pieces: usage, if it was asked for, and the end mark."""
    if body.stream_options is not None and body.stream_options.include_usage:
        ordered = [last[index] for index in sorted(last)]
        yield event({**head, "choices": [], "usage": usage(ordered, num_samples)})
    yield DONE


def finish_fields(output: Output) -> dict[str, Any]:
    """`finish_reason`, and vLLM's `stop_reason`: the stop string or token id that matched."""
    reason = output["meta_info"]["finish_reason"]
    if reason is None:
        return {"finish_reason": None}
    return {"finish_reason": reason["type"], "stop_reason": reason.get("matched")}


def id_fields(body: OpenAIRequest, output: Output) -> dict[str, Any]:
    """The output's ids, weight versions and sampling masks, as far as they were asked for."""
    fields: dict[str, Any] = {}
    if body.return_token_ids:
        fields["token_ids"] = output["output_ids"]
    if body.return_weight_versions:
        fields["weight_versions"] = output["meta_info"]["token_weight_versions"]
    if body.return_sampling_mask:
        found = output["meta_info"]
        fields["sampling_mask"] = csr_lists(found.get("output_token_sampling_mask", []))
        fields["sampling_logprobs"] = found.get("output_token_sampling_logprobs", [])
    return fields


def csr_lists(masks: Sequence[Sequence[int]]) -> dict[str, list[int]]:
    """Masks as vLLM's two lists: token i has `token_ids[offsets[i] : offsets[i + 1]]`."""
    return {
        "token_ids": list(itertools.chain.from_iterable(masks)),
        "offsets": list(itertools.accumulate(map(len, masks), initial=0)),
    }


def token_id_name(token: int) -> str:
    """The name of a token by its id, as in vLLM."""
    return f"token_id:{token}"


def token_name(body: OpenAIRequest, texts: TokenTexts, token: int) -> str:
    return token_id_name(token) if body.return_tokens_as_token_ids else texts[token]


def outputs_of(body: OpenAIRequest) -> tuple[str, dict[str, Any] | None]:
    """The field that says what the text may be, and it as `structured_outputs`.

    Raises InvalidRequestError for two such fields, what llguidance refuses, and fields that go
    against it.
    """
    name, outputs = "structured_outputs", checked_outputs(body.structured_outputs)
    wanted = None if body.response_format is None else body.response_format.outputs()
    if wanted is not None and outputs is not None:
        raise InvalidRequestError(
            f"response_format={reprlib.repr(wanted)} contradicts "
            f"structured_outputs={reprlib.repr(outputs)}; give one of them"
        )
    if wanted is not None:
        name, outputs = "response_format", checked_outputs(wanted)
    if outputs is not None:
        check_outputs(outputs, name)
        check_free_end(body, name)
    return name, outputs


def check_free_end(body: OpenAIRequest, name: str) -> None:
    """Refuses what keeps a guided output from its end."""
    for field, value in (("ignore_eos", body.ignore_eos), ("min_tokens", body.min_tokens)):
        if value:
            raise InvalidRequestError(
                f"{field}={value!r} goes without {name}, which an end token ends"
            )


def adapter(context: ServerContext, body: OpenAIRequest) -> str | None:
    """The adapter that the model's name means; the engine refuses one that is not loaded."""
    is_default = body.model in (None, context.config.model_name)
    return context.default_adapter if is_default else body.model


def request_params(
    engine: Engine,
    body: OpenAIRequest,
    num_prompt_tokens: int,
    max_tokens: int | None,
    *,
    default_tokens: int | None = None,
    text_options: Mapping[str, Any] | None = None,
) -> SamplingParams:
    """Sampling parameters for a prompt; what is not given is as the model's folder has it.

    Without a maximum, `default_tokens` are sampled if they fit; None takes as many as fit.
    `text_options` are fields that say what the text is.
    """
    given = {**body.given(), **(text_options or {})}
    limit = engine.max_new_tokens(num_prompt_tokens)
    least = 0 if max_tokens == 0 else 1
    if limit < least:
        longest = limit + num_prompt_tokens - least
        raise InvalidRequestError(
            f"the prompt has {num_prompt_tokens} tokens, the limit is {longest}"
        )
    if max_tokens is None:
        wanted = limit if default_tokens is None else max(default_tokens, body.min_tokens or 0)
        max_tokens = min(limit, wanted)
    given |= {"max_new_tokens": max_tokens, "min_new_tokens": body.min_tokens}
    return engine.get_default_sampling_params().override(given)
