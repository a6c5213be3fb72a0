"""Names of other engines' options and sampling fields, and their counterparts here.

Covers vLLM's EngineArgs, the server arguments of SGLang and SGLang-JAX, and Tunix's options, and
the sampling fields of vLLM, SGLang, OpenAI and transformers, except those that have the same name
here. Host-only; no JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from sgljax_engine.errors import InvalidConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ForeignOption:
    """An option of another engine.

    Attributes:
        name: Its name there.
        engine: The other engine's name, if given.
        option: The matching option here; None if there is none.
        note: Why there is no matching option, or how the two differ.
        is_opposite: Whether True there means False here.
    """

    name: str
    engine: str = "another engine"
    option: str | None = None
    note: str = ""
    is_opposite: bool = False

    @property
    def hint(self) -> str:
        """The hint for a user who gives this name."""
        if self.option is None:
            return f"it is an option of {self.engine} without a counterpart here: {self.note}"
        what = "the opposite of " if self.is_opposite else ""
        note = f", {self.note}" if self.note else ""
        return f"it is {self.engine}'s name of {what}{self.option!r}{note}"

    def translate(self, value: Any) -> Any:
        """The value of `option` that means the same.

        Raises:
            InvalidConfigError: for a value that has no opposite.
        """
        if not self.is_opposite:
            return value
        if not isinstance(value, bool):
            raise InvalidConfigError(f"{self.name} must be True or False, got {value!r}")
        return not value


_RENAMED = (
    ("block_size", "vLLM", "page_size", ""),
    ("context_length", "SGLang", "max_model_len", ""),
    ("data_type", "Tunix", "dtype", ""),
    ("disable_hybrid_kv_cache_manager", "vLLM", "disable_hybrid_swa_memory", ""),
    ("dp", "SGLang", "data_parallel_size", ""),
    ("dp_size", "SGLang", "data_parallel_size", ""),
    ("ep", "SGLang", "expert_parallel_size", ""),
    ("ep_size", "SGLang", "expert_parallel_size", ""),
    ("gpu_memory_utilization", "vLLM", "mem_fraction_static", "of the memory beside the weights"),
    ("hbm_utilization", "Tunix", "mem_fraction_static", "of the memory beside the weights"),
    ("kv_cache_size", "Tunix", "max_model_len", ""),
    ("lora_target_modules", "SGLang", "lora_targets", ""),
    ("max_loras_per_batch", "SGLang", "max_loras", ""),
    ("max_num_batched_tokens", "vLLM", "chunked_prefill_size", ""),
    ("max_num_seqs", "vLLM", "max_running_requests", ""),
    ("max_seq_len", "SGLang", "max_model_len", ""),
    ("max_total_tokens", "SGLang", "num_kv_tokens", ""),
    ("precompile_bs_paddings", "SGLang", "batch_buckets", ""),
    ("precompile_token_paddings", "SGLang", "token_buckets", ""),
    ("seed", "vLLM", "random_seed", ""),
    ("tensor_parallel_size", "vLLM", "tp_size", ""),
    ("tp", "SGLang", "tp_size", ""),
)
"""Rows of: name, engine, matching option here, difference."""

_WITHOUT_COUNTERPART = (
    (
        "`expert_parallel_size` says into how many parts the experts are divided",
        "enable_expert_parallel",
    ),
    (
        "the rollout's or engine's `mesh` decides on which devices it runs; `tp_size` and "
        "`data_parallel_size` share them out",
        "pipeline_parallel_size pp_size enable_dp_attention "
        "device device_indexes nnodes node_rank dist_init_addr dist_timeout "
        "distributed_executor_backend disable_custom_all_reduce all2all_backend moe_backend "
        "enable_single_process",
    ),
    (
        "the model comes from `model_path` or `model_config`, and in a rollout from the actor",
        "model model_impl model_version hf_config_path hf_overrides json_model_override_args "
        "load_format model_loader_extra_config download_dir revision code_revision config_format "
        "trust_remote_code hf_token served_model_name rope_scaling rope_theta task runner convert "
        "is_embedding init_with_random_weights",
    ),
    (
        "the tokenizer is the argument `tokenizer`",
        "tokenizer tokenizer_path tokenizer_mode tokenizer_revision skip_tokenizer_init",
    ),
    (
        "logging is Python's, and get_internal_state has the numbers",
        "log_level log_level_http log_requests log_requests_level disable_log_stats "
        "disable_log_requests enable_log_requests kv_cache_metrics show_time_cost "
        "decode_log_interval enable_metrics enable_cache_report enable_request_time_stats_logging "
        "show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces "
        "enable_precision_tracer crash_dump_folder kv_events_config",
    ),
    (
        "`max_loras` above 0 makes an engine with adapters, which `load_adapter` loads; a rollout "
        "takes LoRA from the Tunix actor, as its own `lora` and `lora_scaling` say",
        "enable_lora enable_static_lora max_cpu_loras lora_paths lora_modules lora_dtype "
        "lora_extra_vocab_size lora_scaling lora_backend fully_sharded_loras lora_config",
    ),
    (
        "retracted requests are computed again, so that nothing is swapped",
        "swap_space cpu_offload_gb preemption_mode",
    ),
    (
        "weights and activations have the one `dtype`, and keys of 'kv_cache_dtype' int8 a scale "
        "for each token",
        "quantization_param_path calculate_kv_scales weight_dtype",
    ),
    (
        "it is always on",
        "async_scheduling enable_chunked_prefill enable_mixed_chunk skip_server_warmup "
        "enable_engine_loop_run_forever_daemon",
    ),
    ("the engine can always sleep", "enable_sleep_mode enable_memory_saver"),
    (
        "every program is compiled by XLA",
        "enforce_eager compilation_config cuda_graph_sizes max_seq_len_to_capture tpu_backend_type",
    ),
    (
        "every program is compiled by XLA when it is first needed, or by `Engine.warmup`",
        "disable_precompile xla_backend",
    ),
    (
        "'schedule_policy' says in which order requests start, and 'init_new_token_ratio' how much "
        "room a running one keeps",
        "scheduling_policy schedule_conservativeness scheduler_delay_factor "
        "max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold",
    ),
    (
        "the engine is in this process; serve(host=, port=, api_key=) puts it on HTTP",
        "host port api_key server_mode worker_cls disable_frontend_multiprocessing "
        "watchdog_timeout sleep_on_idle tool_call_parser reasoning_parser",
    ),
    (
        "thresholds are looked up exactly, without a sort",
        "use_sort_for_toppk_minp",
    ),
    (
        "the arguments return_logprob and top_logprobs_num of `generate` ask for log-probs, "
        "`logprobs_mode` of a rollout says which",
        "max_logprobs logprobs_mode",
    ),
    (
        "each request's sampling parameters set it",
        "generation_config override_generation_config preferred_sampling_params",
    ),
    (
        "'num_kv_tokens' sets the size of the pool, in tokens",
        "num_gpu_blocks_override kv_cache_memory_bytes num_gpu_blocks",
    ),
    (
        "it is not implemented",
        "grammar_backend guided_decoding_backend structured_outputs_config limit_mm_per_prompt "
        "mm_processor_kwargs multimodal kv_transfer_config disable_sliding_window "
        "disable_cascade_attn enable_prompt_embeds",
    ),
    (
        "'speculation' turns draft tokens on; they come from texts, without a draft model",
        "speculative_config speculative_algorithm speculative_draft_model_path "
        "speculative_num_steps",
    ),
    (
        "the host always prepares and reads batches while the device runs",
        "disable_overlap_schedule stream_output",
    ),
    (
        "settings of vLLM's TPU plugin and of MaxText",
        "additional_config",
    ),
    (
        "prompts are never cut; those that are too long are refused",
        "allow_auto_truncate",
    ),
    (
        "the pool of sliding layers follows from 'max_running_requests'",
        "swa_full_tokens_ratio",
    ),
    ("'chunked_prefill_size' bounds all prompts of a batch together", "max_prefill_tokens"),
    ("pages are compared by their tokens, not by a hash", "prefix_caching_hash_algo"),
)
"""Rows of: reason why there is no such option, names."""


def _all_options() -> dict[str, ForeignOption]:
    options = [
        ForeignOption(name=name, engine=engine, option=option, note=note)
        for name, engine, option, note in _RENAMED
    ]
    options.append(
        ForeignOption(
            name="enable_prefix_caching",
            engine="vLLM",
            option="disable_radix_cache",
            is_opposite=True,
        )
    )
    options += [
        ForeignOption(name=name, note=note)
        for note, names in _WITHOUT_COUNTERPART
        for name in names.split()
    ]
    return {option.name: option for option in sorted(options, key=lambda option: option.name)}


FOREIGN_OPTIONS: Mapping[str, ForeignOption] = MappingProxyType(_all_options())
"""Foreign options by name. None of them is an option of `EngineConfig`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ForeignField:
    """A field of another engine's requests that this engine lacks.

    Clients send such fields with values that ask for nothing, since their library has a default for
    each. These values are accepted, and all others are refused.

    Attributes:
        name: Its name there.
        instead: What to do instead.
        neutral: Values that ask for nothing, besides None, False and empty ones.
        takes_false: Whether False asks for nothing.
    """

    name: str
    instead: str
    neutral: tuple[Any, ...] = ()
    takes_false: bool = True

    def asks_for_nothing(self, value: Any) -> bool:
        """Whether the request would be the same without the field."""
        if value is False:
            return self.takes_false
        if _is_empty(value):
            return True
        if isinstance(value, list) and all(each is False or _is_empty(each) for each in value):
            return True  # nothing for each prompt of a batch
        if not isinstance(value, (bool, int, float, str, list, dict)):
            return False
        # True equals 1 in Python, but means something else.
        return any(
            value == each and isinstance(value, bool) == isinstance(each, bool)
            for each in self.neutral
        )


def foreign_fields(
    rows: Sequence[tuple[str, str]],
    neutral: Mapping[str, tuple[Any, ...]],
    false_asks: Sequence[str] = (),
) -> Mapping[str, ForeignField]:
    """Foreign fields by name.

    Args:
        rows: Pairs of what to do instead, and the names that it applies to.
        neutral: `ForeignField.neutral` of some of them.
        false_asks: Names for which False asks for something.
    """
    return MappingProxyType(
        {
            name: ForeignField(
                name=name,
                instead=instead,
                neutral=neutral.get(name, ()),
                takes_false=name not in false_asks,
            )
            for instead, names in rows
            for name in names.split()
        }
    )


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, (str, list, tuple, dict)) and not value)


FOREIGN_FIELDS = foreign_fields(
    (
        ("draw n samples and choose among them", "best_of"),
        ("it is internal to vLLM; n is the number of samples", "_real_n"),
        ("use logit_bias, allowed_token_ids or bad_token_ids", "logits_processors"),
        ("prompts are never cut; cut them before", "truncate_prompt_tokens"),
        ("use the argument stream of generate", "output_kind"),
        ("streamed text holds back no more than it must", "output_text_buffer_length"),
        (
            "use structured_outputs, with one of json, json_object, regex, choice and grammar",
            "structural_tag",
        ),
        ("every option has a name of its own", "extra_args custom_params"),
        ("use bad_token_ids, single tokens", "bad_words _bad_words_token_ids bad_words_ids"),
        (
            "use the arguments return_logprob and top_logprobs_num of generate",
            "logprobs flat_logprobs",
        ),
        ("use the argument logprob_start_len of generate", "prompt_logprobs"),
        (
            "use the argument token_ids_logprob of generate",
            "logprob_token_ids prompt_logprob_token_ids trace_decode_token_ids",
        ),
        (
            "the argument return_routed_experts of generate gives those of all tokens",
            "routed_experts_prompt_start",
        ),
        (
            "log-probs of a prompt are computed anew by themselves, and nothing is copied",
            "skip_reading_prefix_cache skip_clone",
        ),
        ("use include_stop_str_in_output", "no_stop_trim"),
        ("use stop, plain strings", "stop_regex"),
        (
            "it is called max_new_tokens here",
            "max_tokens max_completion_tokens max_tokens_to_generate",
        ),
        ("it is called min_new_tokens here", "min_tokens"),
        ("use max_new_tokens, which counts no prompt tokens", "max_length"),
        ("use min_new_tokens, which counts no prompt tokens", "min_length"),
        ("it is called seed here", "sampling_seed"),
        ("it is called n here", "num_return_sequences"),
        ("temperature=0 is greedy, anything above it samples", "do_sample"),
        (
            "beam search is not implemented",
            "num_beams use_beam_search beam_size beam_width length_penalty early_stopping",
        ),
        (
            "use repetition_penalty, frequency_penalty or presence_penalty",
            "no_repeat_ngram_size repetition_detection",
        ),
        ("use top_p or min_p", "typical_p"),
        ("nothing is padded", "pad_token_id"),
        (
            "use stop_token_ids, and ignore_eos to stop at no other",
            "eos_token_id eos_tokens",
        ),
        ("it is called stop here", "stop_strings"),
        ("use the argument top_logprobs_num of generate", "top_logprobs"),
        ("use the argument return_logprob of generate", "return_logprobs"),
        ("it is an argument of generate", "stream prompt"),
        ("it is an option of the engine", "stream_interval"),
        ("it is not implemented", "watermarking"),
    ),
    neutral={
        "best_of": (1,),
        "output_text_buffer_length": (0,),
        "do_sample": (True,),
        "num_beams": (1,),
        "beam_size": (1,),
        "beam_width": (1,),
        "length_penalty": (1.0,),
        "no_repeat_ngram_size": (0,),
        "typical_p": (1.0,),
        "top_logprobs": (0,),
        "routed_experts_prompt_start": (0,),
    },
    false_asks=("do_sample",),
)
"""Sampling fields that this engine lacks, by name. None of them is one of `SamplingParams`."""
