"""Fields of SGLang's, vLLM's and OpenAI's request bodies that this server lacks.

A body's class names its mapping, and its own fields are those that are honoured: together they are
the list of fields in docs/server.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sgljax_engine import FOREIGN_FIELDS, ForeignField, foreign_fields

NO_GRAMMAR = "constrained decoding is not implemented"
TEXT_ONLY = "the model takes text only"
NO_FORCED_CALL = "the model cannot be made to call a tool"
_NO_ROUTER = "it steers a cluster of engines, and this is one"
_NO_CACHE_KEY = "the prefix cache is shared by all requests"
_NO_PRIORITY = "the engine's option schedule_policy says in which order requests start"
_RID = "/generate has rid; here the server makes the id"
_EDITS = "use logit_bias, allowed_token_ids or bad_token_ids"
_TEMPLATE = "the chat template is the model's; chat_template_kwargs sets its variables"

_NEUTRAL = {
    "beam_width": (1,),
    "best_of": (1,),
    "function_call": ("none",),
    "include_reasoning": (True,),
    "length_penalty": (1.0,),
    "log_metrics": (True,),
    "modalities": (["text"],),
    "no_logs": (True,),
    "priority": (0,),
    "response_format": ({"type": "text"},),
    "return_mm_kwargs": (True,),
    "routed_experts_prompt_start": (0,),
    "routed_experts_start_len": (0,),
    "service_tier": ("auto", "default"),
    "stream_reasoning": (True,),
    "thinking_token_budget": (-1,),
    "verbosity": ("medium",),
}
_FALSE_ASKS = ("include_reasoning", "log_metrics", "stream_reasoning")

SAMPLING: Mapping[str, ForeignField] = MappingProxyType(
    {name: f for name, f in FOREIGN_FIELDS.items() if name not in ("no_stop_trim", "sampling_seed")}
)
"""Foreign fields of `sampling_params`, without the two names of SGLang's that are honoured."""

GENERATE = foreign_fields(
    (
        (
            TEXT_ONLY,
            "image_data video_data audio_data modalities mm_hashes mm_content_hashes "
            "use_audio_in_video video_config max_dynamic_patch min_dynamic_patch "
            "image_max_dynamic_patch video_max_dynamic_patch images_config "
            "need_wait_for_mm_inputs num_items_assigned encoder_urls",
        ),
        ("use text or input_ids", "input_embeds positional_embed_overrides"),
        (
            "every request brings its whole prompt",
            "session_params session_id conversation_id",
        ),
        (f"{_EDITS} in sampling_params", "custom_logit_processor"),
        ("hidden states do not leave the engine", "return_hidden_states"),
        (
            "the reply has nested lists",
            "return_flat_raw_top_logprobs return_flat_raw_top_logprobs_b64",
        ),
        (
            "it is not implemented",
            "return_sampling_mask return_indexer_topk return_entropy return_bytes background "
            "require_reasoning max_thinking_tokens multi_item_delimiter_indices",
        ),
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
    ),
    _NEUTRAL,
    _FALSE_ASKS,
)
"""Foreign fields of `/generate`."""

_BOTH = (
    ("draw n samples and choose among them", "best_of"),
    ("beam search is not implemented", "use_beam_search length_penalty beam_width"),
    (
        NO_GRAMMAR,
        "structured_outputs guided_json guided_regex guided_choice guided_grammar "
        "guided_decoding_backend guided_whitespace_pattern structural_tag json_schema regex ebnf",
    ),
    ("use stop, plain strings", "stop_regex"),
    ("use include_stop_str_in_output", "no_stop_trim"),
    ("use bad_token_ids, single tokens", "bad_words"),
    (_EDITS, "logits_processors custom_logit_processor"),
    ("use seed", "sampling_seed"),
    ("use max_tokens", "max_new_tokens"),
    ("use min_tokens", "min_new_tokens"),
    ("prompts are never cut; cut them before", "truncate_prompt_tokens truncation_side"),
    ("/generate has token_ids_logprob", "logprob_token_ids token_ids_logprob"),
    ("use repetition_penalty, frequency_penalty or presence_penalty", "repetition_detection"),
    ("thoughts are not bounded apart from the maximum of tokens", "thinking_token_budget"),
    ("every option has a name of its own", "vllm_xargs custom_params extra_args"),
    ("name the adapter as model", "lora_path"),
    (_RID, "rid request_id"),
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
    ("it is not implemented", "watermarking return_token_offsets return_cached_tokens_details"),
    ("metrics count all requests and have no labels", "log_metrics custom_labels"),
)

COMPLETION = foreign_fields(
    (
        *_BOTH,
        ("the model continues its prompt and fills no gap", "suffix"),
        (NO_GRAMMAR, "response_format"),
        ("use prompt", "prompt_embeds input_embeds"),
        ("use echo and logprobs", "prompt_logprobs"),
        ("use max_tokens", "max_completion_tokens"),
    ),
    _NEUTRAL,
    _FALSE_ASKS,
)
"""Foreign fields of `/v1/completions`."""

CHAT = foreign_fields(
    (
        *_BOTH,
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
    ),
    _NEUTRAL,
    _FALSE_ASKS,
)
"""Foreign fields of `/v1/chat/completions`."""

RESPONSE_FORMAT = foreign_fields(
    ((NO_GRAMMAR, "json_schema schema grammar structures triggers format"),), _NEUTRAL
)
"""Foreign fields of `response_format`."""

STREAM_OPTIONS = foreign_fields(
    (
        ("usage comes at the end, with include_usage", "continuous_usage_stats"),
        ("events are not padded", "include_obfuscation"),
    ),
    _NEUTRAL,
)
"""Foreign fields of `stream_options`."""

MESSAGE = foreign_fields(
    (
        (
            "messages hold text, tool_calls and reasoning_content",
            "refusal annotations audio function_call reasoning_details parsed task",
        ),
    ),
    _NEUTRAL,
)
"""Foreign fields of a message. Clients send back what the reply of any server had."""

TEXT_PART = foreign_fields(
    (
        ("the prefix cache decides", "cache_control prompt_cache_breakpoint"),
        (
            TEXT_ONLY,
            "image_url image image_embeds input_audio audio_url audio video_url video file",
        ),
    ),
    _NEUTRAL,
)
"""Foreign fields of a part of a message's content."""

TOOL_CALL = foreign_fields((("it is not implemented", "custom extra_content"),), _NEUTRAL)
"""Foreign fields of a message's tool call."""

TOOL = foreign_fields(
    (("the prefix cache decides", "cache_control"), ("all tools are shown", "defer_loading")),
    _NEUTRAL,
)
"""Foreign fields of a tool, and of its function."""

TOKENIZE = foreign_fields(
    (
        ("use /detokenize", "return_token_strs"),
        (_TEMPLATE, "chat_template"),
        (TEXT_ONLY, "media_io_kwargs mm_processor_kwargs"),
    ),
    _NEUTRAL,
)
"""Foreign fields of `/tokenize`."""
