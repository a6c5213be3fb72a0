"""Every field of Tunix's RolloutConfig, and what it means for `SglJaxRollout`.

Covers google-tunix 0.1.7 and its main branch. docs/tunix.md is generated from these tables.
"""

from __future__ import annotations

import dataclasses
import numbers
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, cast

from tunix.rl.rollout.base_rollout import RolloutConfig

from sgljax_engine import InvalidConfigError
from tunix_sgljax.lora import check_scaling

Treatment = Literal["mapped", "translated", "accepted", "named"]
"""How a field is treated.

"mapped" and "translated": it sets something, under vLLM's name if translated. "accepted": it
repeats what the actor says anyway. "named": it has no meaning; a warning names it, or
`strict_config` refuses it.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RolloutField:
    """A field of RolloutConfig; the text says for messages and docs what it sets, or why nothing.

    `target` is the engine option or sampling field that it sets. `is_new`: only Tunix's main branch
    has it, after 0.1.7.
    """

    name: str
    treatment: Treatment
    text: str
    target: str | None = None
    is_new: bool = False


_NEW = (
    "return_routed_experts",
    "rollout_vllm_free_kv_cache_during_weight_sync",
    "rollout_vllm_overlap_postprocessing",
    "rollout_vllm_server_mode_submission_threshold",
    "rollout_vllm_server_mode_submission_timeout_s",
)


def _table(rows: str, prefix: str = "") -> tuple[RolloutField, ...]:
    """Reads rows of name after the prefix | treatment | target, or - | text."""
    fields = []
    for row in re.sub(r"\n +", " ", rows.strip()).splitlines():
        name, treatment, target, text = map(str.strip, row.split("|"))
        fields.append(
            RolloutField(
                name=prefix + name,
                treatment=cast(Treatment, treatment),
                target=None if target == "-" else target,
                text=text,
                is_new=prefix + name in _NEW,
            )
        )
    return tuple(fields)


SAMPLING_FIELDS = _table(
    """
max_tokens_to_generate | mapped | max_new_tokens |
temperature | mapped | temperature | 0 is greedy
top_p | mapped | top_p | None means 1.0
top_k | mapped | top_k | None, -1 and 0 keep all tokens
seed | mapped | seed | of each row; None is fresh randomness in every call; with an int or a JAX key
  the run is reproducible
eos_tokens | mapped | stop_token_ids | instead of the end tokens of the tokenizer and of the model's
  folder
max_prompt_length | mapped | - | width of the returned left-padded prompts; a longer prompt is never
  cut, the width grows to the next power of two
return_logprobs | mapped | - | whether [`logprobs`](#what-differs) are returned
"""
)
"""Fields read at every call."""

MODEL_FIELDS = _table(
    """
data_type | mapped | dtype | of weights, activations and KV cache; None takes [what Tunix computes
  the actor in](#dtype)
rollout_mapping_config | mapped | - | weight mapping with transposes and hooks; without it, the
  model's own for `sglang_jax`, or else the built-in one
kv_cache_size | mapped | - | bounds a sequence if no context length is set: the larger of this value
  and `max_prompt_length` + `max_tokens_to_generate`, of the longest of a cluster's configs
tensor_parallel_size | mapped | tp_size | times `expert_parallel_size`, as Tunix counts devices; -1
  takes the size of the mesh's tensor axis, or all devices that `data_parallel_size` leaves
data_parallel_size | mapped | data_parallel_size | -1 takes all devices that `tensor_parallel_size`
  leaves
expert_parallel_size | mapped | expert_parallel_size | parts of each layer's experts; with
  `tensor_parallel_size` -1 an engine has at least as many devices. -1 is 1
return_routed_experts | mapped | enable_return_routed_experts | `routed_experts` of the output are
  [those of each token](sampling.md#experts); a model without experts has none
"""
)
"""Fields of model and mesh."""

SGLANG_JAX_FIELDS = _table(
    """
model_version | mapped | - | a local Hugging Face folder gives the model's shape and its end tokens;
  any other name is accepted
context_length | mapped | max_model_len |
mem_fraction_static | mapped | mem_fraction_static | of the memory that the weights leave free; both
  defaults are 0.2
init_with_random_weights | named | - | weights come from the actor, never from a file
disable_radix_cache | mapped | disable_radix_cache | its default, True, shares all the same;
  `SglJaxRollout(disable_radix_cache=True)` does not
enable_deterministic_sampling | mapped | enable_deterministic_sampling | the same bits whatever the
  batch ([Deterministic sampling](sampling.md#deterministic-sampling))
use_sort_for_toppk_minp | named | - | thresholds are looked up exactly, without a sort
enable_static_lora | accepted | - | the actor's parameters show whether it has LoRA
enable_single_process | named | - | it is always one process
lora_target_modules | accepted | - | the actor's parameters show where LoRA is
max_lora_rank | mapped | - | the maximum rank of LoRA pairs
lora_scaling | mapped | - | the factor alpha / rank of LoRA pairs, which is not in their arrays
precompile_bs_paddings | mapped | batch_buckets | the largest also sets `max_running_requests`
  unless that is set
precompile_token_paddings | mapped | token_buckets | the largest also sets `chunked_prefill_size`
  unless that is set
chunked_prefill_size | mapped | chunked_prefill_size | -1 is the engine's default of 2048
page_size | mapped | page_size | at Tunix's default of 128 the engine's default of 16 applies
load_format | named | - | weights come from the actor
max_running_requests | mapped | max_running_requests | None is the engine's default of 256
log_level | mapped | - | level of our packages' loggers; "info" leaves them alone
kwargs | mapped | - | engine options by their own names, and by SGLang's and vLLM's as
  [below](#names-of-engine-options); others are refused
""",
    prefix="rollout_sglang_jax_",
)
"""Fields read when the rollout is made."""

VLLM_FIELDS = _table(
    """
server_mode | named | - | calls of all threads are always batched
server_mode_submission_threshold | named | - | requests never wait for others
server_mode_submission_timeout_s | named | - | requests never wait for others
model_version | mapped | - | a local Hugging Face folder gives the model's end tokens; shape and
  weights come from the actor
lora_config | translated | - | `max_lora_rank` is the maximum rank of LoRA pairs; the actor's
  parameters show the rest
hbm_utilization | translated | mem_fraction_static | of the memory that the weights leave free, not
  of all; both defaults are 0.2
init_with_random_weights | named | - | weights come from the actor, never from a file
tpu_backend_type | named | - | it is always JAX
async_scheduling | named | - | the host always works while the device runs
logprobs_mode | translated | - | `SglJaxRollout(logprobs_mode=...)`: "raw_logprobs" is that mode;
  the default gives the trainer's log-probs, which are the same without filters
hf_config_path | named | - | shape and weights come from the actor
additional_config | named | - | settings of vLLM's TPU plugin and of MaxText
enable_dp_attention | named | - | the mesh decides how the engine is sharded
delete_dst_buffers | named | - | old weights are freed when the new ones serve
free_kv_cache_during_weight_sync | named | - | `SglJaxRollout(release_kv_between_steps=True)` frees
  it, and so during a sync
overlap_postprocessing | named | - | texts are always made while the device runs
max_num_batched_tokens | translated | chunked_prefill_size | activations of a prefill of that size
  must fit beside the KV cache
max_num_seqs | translated | max_running_requests |
reshard_chunk_size | named | - | an update takes no more memory than it needs
kwargs | translated | - | vLLM's engine options, as [below](#names-of-engine-options); the warning
  names others
sampling_kwargs | translated | - | fields of [SamplingParams](sampling.md), by vLLM's names or the
  engine's; [below](#vllms-sampling-fields)
""",
    prefix="rollout_vllm_",
)
"""vLLM's fields; read when the rollout is made, except `sampling_kwargs`."""

FIELDS: Mapping[str, RolloutField] = MappingProxyType(
    {
        field.name: field
        for table in (SAMPLING_FIELDS, MODEL_FIELDS, SGLANG_JAX_FIELDS, VLLM_FIELDS)
        for field in table
    }
)
"""All fields by name."""


def default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def entries_of(config: RolloutConfig, name: str) -> Mapping[str, Any]:
    """Reads a field that holds a dict or None; None counts as an empty dict."""
    value = getattr(config, name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidConfigError(f"RolloutConfig.{name} must be a dict, got {value!r}")
    return value


def lora_scaling(config: RolloutConfig) -> float | None:
    """The factor of LoRA pairs that a config names, alpha / rank; None if it names none."""
    name = "rollout_sglang_jax_lora_scaling"
    return check_scaling(f"RolloutConfig.{name}", getattr(config, name))


def max_lora_rank(config: RolloutConfig) -> int | None:
    """The maximum rank of LoRA pairs that a config names; None if it names none.

    Read from `rollout_sglang_jax_max_lora_rank`, else `max_lora_rank` of
    `rollout_vllm_lora_config`, else of `rollout_vllm_kwargs`.
    """
    name = "max_lora_rank"
    places = [("rollout_sglang_jax_max_lora_rank", config.rollout_sglang_jax_max_lora_rank)]
    places += [
        (f"{field}[{name!r}]", entries_of(config, field).get(name))
        for field in ("rollout_vllm_lora_config", "rollout_vllm_kwargs")
    ]
    for source, value in places:
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
            raise InvalidConfigError(
                f"RolloutConfig.{source} must be None or an integer >= 1, got {value!r}"
            )
        return int(value)
    return None
