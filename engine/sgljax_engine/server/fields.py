"""Fields of request bodies: the base of all bodies, and what other servers have and this lacks.

A body's class names its mapping of other servers' fields, and its own fields are those that are
honoured: together they are the list of fields in docs/server.md.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

from sgljax_engine import FOREIGN_FIELDS, ForeignField, foreign_fields

UNKNOWN_FIELD, FOREIGN_FIELD = "unknown_field", "foreign_field"
"""Types of the errors of `Body`; their context has the field's `name`."""

_MAX_NAME_LEN = 64
"""Longer names of unknown fields are not compared with known ones."""


class FirstErrorOnly(FailFast):
    """Else 50,000 wrong ids make as many errors. Pydantic's has no hash: no union can hold it."""

    def __hash__(self) -> int:
        return hash(FailFast)


TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], FirstErrorOnly()]
ListsOfTokenIds = Annotated[list[TokenIds], FirstErrorOnly()]
Texts = Annotated[list[str], FirstErrorOnly()]


class Body(BaseModel):
    """A JSON object. Nothing is converted: a number as text is refused.

    null stands for a field that is not given, unless the field is required. Fields of other servers
    (`foreign`) are left out where they ask for nothing. `nested` are fields that a client may take
    for fields of this body, and where they are; `only` are own fields with few of the values that
    other servers take: these, and why.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    foreign: ClassVar[Mapping[str, ForeignField]] = {}
    empty_is_null: ClassVar[frozenset[str]] = frozenset()
    nested: ClassVar[Mapping[str, str]] = {}
    only: ClassVar[Mapping[str, tuple[Sequence[str], str]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nothings(cls, data: Any) -> Any:
        """The fields that ask for something; refuses the first unknown one."""
        return {n: v for n, v in data.items() if cls._asks(n, v)} if type(data) is dict else data

    @classmethod
    def _asks(cls, name: str, value: Any) -> bool:
        # `schema_` stands for `schema`, which every model of pydantic has.
        own = cls.model_fields.get(name) or cls.model_fields.get(f"{name}_")
        if own is not None:
            is_null = value is None or (value == "" and name in cls.empty_is_null)
            values, why = cls.only.get(name, (None, ""))
            if values is not None and not is_null and value not in values:
                raise _not_supported(name, value, f"{why}; use {' or '.join(map(repr, values))}")
            return own.is_required() or not is_null
        foreign = cls.foreign.get(name)
        if foreign is None:
            raise PydanticCustomError(
                UNKNOWN_FIELD, "unknown field{hint}", {"name": name, "hint": cls._hint(name)}
            )
        if foreign.asks_for_nothing(value):
            return False
        raise _not_supported(name, value, foreign.instead)

    @classmethod
    def _hint(cls, name: str) -> str:
        if name in cls.nested:
            return f"; it is a field of {cls.nested[name]}"
        if len(name) > _MAX_NAME_LEN:
            return ""
        near = difflib.get_close_matches(name, cls.model_fields, n=1)
        return f"; did you mean {near[0]!r}?" if near else ""


def _not_supported(name: str, value: Any, instead: str) -> PydanticCustomError:
    context = {"name": name, "value": value, "instead": instead}
    return PydanticCustomError(FOREIGN_FIELD, "is not supported: {instead}", context)


class SamplingFields(Body):
    """`SamplingParams` by their own names; what is not given has its default."""

    empty_is_null: ClassVar[frozenset[str]] = frozenset({"stop"})

    n: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_k: int | None = Field(None, ge=-1)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_token_ids: TokenIds | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = Field(
        None, description="one of `json`, `json_object`, `regex`, `choice` and `grammar`"
    )
    return_sampling_mask: bool | None = Field(
        None, description="ids that each token was drawn from; at most 512, as `top_k` then is"
    )

    def given(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in SamplingFields.model_fields}
        return {name: value for name, value in values.items() if value is not None}


_GRAMMARS = "use structured_outputs, with one of json, json_object, regex, choice and grammar"
TEXT_ONLY = "the model takes text only"
_NO_ROUTER = "it steers a cluster of engines, and this is one"
_NO_CACHE_KEY = "the prefix cache is shared by all requests"
_NO_PRIORITY = "the engine's option schedule_policy says in which order requests start"
_EDITS = "use logit_bias, allowed_token_ids or bad_token_ids"
_TEMPLATE = "the chat template is the model's; chat_template_kwargs sets its variables"

_NEUTRAL = {
    "function_call": ("none",),
    "include_reasoning": (True,),
    "log_metrics": (True,),
    "modalities": (["text"],),
    "no_logs": (True,),
    "priority": (0,),
    "return_mm_kwargs": (True,),
    "routed_experts_prompt_start": (0,),
    "routed_experts_start_len": (0,),
    "service_tier": ("auto", "default"),
    "stream_reasoning": (True,),
    "thinking_token_budget": (-1,),
    "verbosity": ("medium",),
}
_FALSE_ASKS = ("include_reasoning", "log_metrics", "stream_reasoning")


def _foreign(*rows: tuple[str, str]) -> dict[str, ForeignField]:
    """Fields of other servers' bodies, from pairs of what to do instead and names."""
    return dict(foreign_fields(rows, _NEUTRAL, _FALSE_ASKS))


def _same_as_in_process(names: str) -> dict[str, ForeignField]:
    return {name: FOREIGN_FIELDS[name] for name in names.split()}


SAMPLING = {
    name: f for name, f in FOREIGN_FIELDS.items() if name not in ("no_stop_trim", "sampling_seed")
}

GENERATE = _foreign(
    (
        TEXT_ONLY,
        "image_data video_data audio_data modalities mm_hashes mm_content_hashes "
        "use_audio_in_video video_config max_dynamic_patch min_dynamic_patch "
        "image_max_dynamic_patch video_max_dynamic_patch images_config "
        "need_wait_for_mm_inputs num_items_assigned encoder_urls",
    ),
    ("use text or input_ids", "input_embeds positional_embed_overrides"),
    ("every request brings its whole prompt", "session_id conversation_id"),
    (f"{_EDITS} in sampling_params", "custom_logit_processor"),
    ("hidden states do not leave the engine", "return_hidden_states"),
    (
        "the reply has nested lists",
        "return_flat_raw_top_logprobs return_flat_raw_top_logprobs_b64",
    ),
    (
        "it is not implemented",
        "return_indexer_topk return_entropy return_bytes background "
        "require_reasoning multi_item_delimiter_indices",
    ),
    ("give it in sampling_params, with reasoning_tags", "max_thinking_tokens"),
    ("the reply has the experts of all tokens", "routed_experts_start_len"),
    ("the caller has them: tokenize the text with /tokenize", "return_prompt_token_ids"),
    ("name the adapter with lora_path", "lora_id"),
    (
        _NO_ROUTER,
        "bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size "
        "routed_dp_rank data_parallel_rank disagg_prefill_dp_rank kv_router_hint routing_key "
        "http_worker_ipc",
    ),
    (_NO_PRIORITY, "priority"),
    (_NO_CACHE_KEY, "extra_key cache_salt"),
    ("requests are not logged", "no_logs"),
    ("metrics count all requests and have no labels", "log_metrics custom_labels"),
    ("requests are not traced across processes", "external_trace_header received_time"),
)

_BOTH = _same_as_in_process(
    "best_of use_beam_search length_penalty beam_width structural_tag "
    "stop_regex no_stop_trim bad_words logits_processors "
    "truncate_prompt_tokens repetition_detection custom_params extra_args watermarking"
) | _foreign(
    (
        _GRAMMARS,
        "json_schema regex ebnf guided_json guided_regex guided_choice guided_grammar "
        "guided_decoding_backend guided_whitespace_pattern",
    ),
    (_EDITS, "custom_logit_processor"),
    ("use seed", "sampling_seed"),
    ("use max_tokens", "max_new_tokens"),
    ("use min_tokens", "min_new_tokens"),
    ("prompts are never cut; cut them before", "truncation_side"),
    ("/generate has token_ids_logprob", "logprob_token_ids token_ids_logprob"),
    ("every option has a name of its own", "vllm_xargs"),
    ("name the adapter as model", "lora_path"),
    ("/generate has rid; here the server makes the id", "rid request_id"),
    ("every request brings its whole prompt", "session_params session_id"),
    (_NO_PRIORITY, "priority"),
    (_NO_CACHE_KEY, "cache_salt extra_key"),
    (
        _NO_ROUTER,
        "kv_transfer_params ec_transfer_params bootstrap_host bootstrap_port bootstrap_room "
        "bootstrap_pair_key data_parallel_rank routed_dp_rank disagg_prefill_dp_rank",
    ),
    ("the engine's option stream_interval sets it for all requests", "stream_interval"),
    (
        TEXT_ONLY,
        "mm_processor_kwargs return_mm_kwargs use_audio_in_video max_dynamic_patch "
        "min_dynamic_patch",
    ),
    ("/generate has return_routed_experts", "return_routed_experts routed_experts_prompt_start"),
    ("hidden states do not leave the engine", "return_hidden_states"),
    ("it is not implemented", "return_token_offsets return_cached_tokens_details"),
    ("metrics count all requests and have no labels", "log_metrics custom_labels"),
)

COMPLETION = _BOTH | _foreign(
    ("the model continues its prompt and fills no gap", "suffix"),
    ("chat knows the marks of thoughts", "thinking_token_budget max_thinking_tokens"),
    ("use prompt", "prompt_embeds input_embeds"),
    ("use echo and logprobs", "prompt_logprobs"),
    ("use max_tokens", "max_completion_tokens"),
)

CHAT = _BOTH | _foreign(
    (TEXT_ONLY, "audio modalities media_io_kwargs"),
    ("use tools", "functions function_call web_search_options"),
    ("replies are not kept", "store"),
    ("all requests are served alike", "service_tier"),
    (
        "give the template's variable in chat_template_kwargs",
        "reasoning_effort reasoning documents",
    ),
    ("the prompt says how long an answer is to be", "verbosity"),
    ("speculation is the engine's option", "prediction"),
    ("the prefix cache decides", "prompt_cache_retention prompt_cache_options"),
    ("it is not implemented", "moderation return_prompt_text task"),
    (_TEMPLATE, "chat_template"),
    ("the chat template writes all special tokens", "add_special_tokens"),
    ("the prompt is the conversation; /v1/completions has echo", "echo"),
    ("use /v1/completions with echo and logprobs", "prompt_logprobs"),
    ("separate_reasoning=false keeps thoughts in the content", "include_reasoning"),
    ("thoughts come as they are sampled", "stream_reasoning"),
)

RESPONSE_FORMAT = _foreign(
    ('use {"type": "json_schema", "json_schema": {"name", "schema"}}', "schema"),
    (_GRAMMARS, "grammar structures triggers format"),
)

TOOL_CHOICE = _foreign(("give the tools that may be called as tools", "allowed_tools custom"))

STREAM_OPTIONS = _foreign(
    ("usage comes at the end, with include_usage", "continuous_usage_stats"),
    ("events are not padded", "include_obfuscation"),
)

MESSAGE = _foreign(
    (
        "messages hold text, tool_calls and reasoning_content",
        "refusal annotations audio function_call reasoning_details parsed task",
    )
)

TEXT_PART = _foreign(
    ("the prefix cache decides", "cache_control prompt_cache_breakpoint"),
    (
        TEXT_ONLY,
        "image_url image image_embeds input_audio audio_url audio video_url video file",
    ),
)

TOOL_CALL = _foreign(("it is not implemented", "custom extra_content"))

TOOL = _foreign(
    ("the prefix cache decides", "cache_control"), ("all tools are shown", "defer_loading")
)

TOKENIZE = _foreign(
    ("use /detokenize", "return_token_strs"),
    (_TEMPLATE, "chat_template"),
    (TEXT_ONLY, "media_io_kwargs mm_processor_kwargs"),
)
