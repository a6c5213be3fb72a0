"""What a name of another engine is called in a config that holds a RolloutConfig."""

from __future__ import annotations

import dataclasses
import difflib

from tunix.rl.rollout.base_rollout import RolloutConfig

from sgljax_engine import FOREIGN_FIELDS, FOREIGN_OPTIONS, EngineConfig, SamplingParams

_MEANINGS = {
    "max_tokens_to_generate": "max_new_tokens max_tokens max_completion_tokens",
    "eos_tokens": "stop_token_ids eos_token_id eos_token_ids",
    "return_logprobs": (
        "logprobs return_logprob top_logprobs flat_logprobs output_scores output_logits"
    ),
    "seed": "sampling_seed random_seed",
    "max_prompt_length": "max_prompt_tokens max_input_length",
}
"""Fields of RolloutConfig, and names of vLLM, SGLang, OpenAI and transformers for the same."""

_RENAMED = {name: field for field, names in _MEANINGS.items() for name in names.split()}

_ELSEWHERE = dict.fromkeys(
    ("n", "num_return_sequences", "num_generations", "best_of"),
    "grpo_config.num_generations says how many completions a prompt gets",
) | {
    "max_length": "max_tokens_to_generate counts the completion's tokens, max_prompt_length the "
    "prompt's",
    "min_length": "sgljax_config.sampling_params takes min_new_tokens",
    "min_tokens": "sgljax_config.sampling_params takes min_new_tokens",
    "stop_strings": "sgljax_config.sampling_params takes stop",
}

_NEAR = 0.81
"""Likeness of two names above which one is a misspelling of the other."""


def rollout_field_hint(name: str) -> str | None:
    """What to write instead of a key that is no field of RolloutConfig; None if nothing is known.

    By meaning where other engines have the name, and only else by spelling.
    """
    if name in _RENAMED:
        return f"it is called {_RENAMED[name]} here"
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    if name in SamplingParams.__slots__:
        return f"sgljax_config.sampling_params takes {name}"
    if name in FOREIGN_FIELDS:
        return FOREIGN_FIELDS[name].instead
    if name in EngineConfig.option_names():
        return f"sgljax_config takes {name}"
    if name in FOREIGN_OPTIONS:
        option = FOREIGN_OPTIONS[name]
        where = "" if option.option is None else ": sgljax_config takes it"
        return f"{option.hint}{where}"
    fields = [field.name for field in dataclasses.fields(RolloutConfig)]
    near = difflib.get_close_matches(name, fields, n=1, cutoff=_NEAR)
    return f"did you mean {near[0]}?" if near else None
