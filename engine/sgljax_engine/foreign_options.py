"""Names of other engines' options, and what each is called here.

Covers vLLM's EngineArgs, the server arguments of SGLang and SGLang-JAX, and Tunix's options, except
those that have the same name here. Host-only; no JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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
        note: Why there is none, or how the two differ.
        is_opposite: Whether True there is False here.
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
"""Name, engine, the option here and how it differs."""

_WITHOUT_COUNTERPART = (
    (
        "the rollout's or engine's `mesh` decides on which devices it runs; `tp_size` and "
        "`data_parallel_size` share them out",
        "pipeline_parallel_size pp_size expert_parallel_size ep_size enable_expert_parallel "
        "enable_dp_attention "
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
        "weights, activations and KV cache have the one `dtype`",
        "quantization_param_path kv_cache_dtype calculate_kv_scales weight_dtype",
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
        "requests are served first come, first served, and 'init_new_token_ratio' says how "
        "much room a running one keeps",
        "scheduling_policy schedule_policy schedule_conservativeness scheduler_delay_factor "
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
"""Why there is no such option, and the names."""


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
