"""Names of other engines in a rollout's config: the hint goes by meaning, never by spelling."""

from __future__ import annotations

import dataclasses

import pytest
from transformers import GenerationConfig
from tunix.rl.rollout.base_rollout import RolloutConfig

from sgljax_engine import FOREIGN_FIELDS, FOREIGN_OPTIONS, EngineConfig, SamplingParams
from tunix_sgljax.rollout_config.hints import rollout_field_hint

FIELDS = {field.name for field in dataclasses.fields(RolloutConfig)}

VLLM = """
n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop
stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs
prompt_logprob_token_ids prompt_logprob_start logprob_token_ids flat_logprobs detokenize
skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind
stream_interval skip_clone output_text_buffer_length structured_outputs logit_bias
allowed_token_ids extra_args bad_words skip_reading_prefix_cache thinking_token_budget
repetition_detection routed_experts_prompt_start trace_decode_token_ids
"""
SGLANG = """
max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty
presence_penalty repetition_penalty min_new_tokens n json_schema regex ebnf structural_tag
ignore_eos skip_special_tokens spaces_between_special_tokens no_stop_trim custom_params
stream_interval logit_bias sampling_seed
"""
TRANSFORMERS = {name for name in GenerationConfig().to_dict() if not name.startswith("_")}
OTHERS = {*FOREIGN_FIELDS, *FOREIGN_OPTIONS, *SamplingParams.__slots__}
OTHERS |= {*EngineConfig.option_names(), *VLLM.split(), *SGLANG.split(), *TRANSFORMERS}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        *(
            (name, "it is called max_tokens_to_generate here")
            for name in ("max_new_tokens", "max_tokens", "max_completion_tokens")
        ),
        ("stop_token_ids", "it is called eos_tokens here"),
        ("eos_token_id", "it is called eos_tokens here"),
        ("logprobs", "it is called return_logprobs here"),
        ("sampling_seed", "it is called seed here"),
        ("n", "grpo_config.num_generations says how many completions a prompt gets"),
        ("min_p", "sgljax_config.sampling_params takes min_p"),
        ("min_tokens", "sgljax_config.sampling_params takes min_new_tokens"),
        ("stop", "sgljax_config.sampling_params takes stop"),
        ("num_beams", "beam search is not implemented"),
        ("page_size", "sgljax_config takes page_size"),
        (
            "gpu_memory_utilization",
            "it is vLLM's name of 'mem_fraction_static', of the memory beside the weights: "
            "sgljax_config takes it",
        ),
        ("temprature", "did you mean temperature?"),
        ("max_token_to_generate", "did you mean max_tokens_to_generate?"),
        ("nonsense", None),
    ],
)
def test_hints(name, hint):
    assert rollout_field_hint(name) == hint


def test_no_name_of_another_engine_is_taken_for_a_misspelling():
    hints = {name: rollout_field_hint(name) or "" for name in OTHERS - FIELDS}
    assert len(hints) > 250
    assert {name: hint for name, hint in hints.items() if "did you mean" in hint} == {}


@pytest.mark.parametrize("names", [VLLM.split(), SGLANG.split(), TRANSFORMERS])
def test_a_hint_never_names_a_field_that_is_not_there(names):
    """What a hint says a section takes, it takes."""
    for name in set(names) - FIELDS:
        hint = rollout_field_hint(name) or ""
        if hint.startswith("it is called "):
            assert hint.split()[3] in FIELDS, name
        if hint.startswith("sgljax_config.sampling_params takes "):
            assert hint.split()[-1] in SamplingParams.__slots__, name
        if hint.startswith("sgljax_config takes "):
            assert hint.split()[-1] in EngineConfig.option_names(), name
