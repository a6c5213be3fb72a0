"""The sampling fields in `rollout_vllm_sampling_kwargs`, by vLLM's names or the engine's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tunix.rl.rollout.base_rollout import RolloutConfig

from sgljax_engine import InvalidConfigError, InvalidRequestError, SamplingParams
from tunix_sgljax.rollout_config.fields import entries_of

_FIELD = "rollout_vllm_sampling_kwargs"
_MAX_TOKENS = 2**63 - 1

RENAMED = {"min_tokens": "min_new_tokens"}
"""vLLM's names of fields that are passed on."""

DECIDED = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "max_tokens": "max_tokens_to_generate",
    "max_new_tokens": "max_tokens_to_generate",
}
"""Fields that another field of RolloutConfig sets, which Tunix's trainer also follows."""

WITHOUT_MEANING = {
    "logprobs": "return_logprobs asks for log-probs",
    "prompt_logprobs": "a rollout returns no log-probs of prompts",
    "flat_logprobs": "log-probs come as arrays",
    "output_kind": "a rollout returns whole completions",
    "detokenize": "a rollout always returns text",
    "skip_reading_prefix_cache": "the prefix cache does not change outputs",
    "skip_clone": "sampling parameters are immutable",
}
"""Fields that do not change sampling, and why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedSampling:
    """What `rollout_vllm_sampling_kwargs` asks for; `unused` entries have the reason."""

    params: Mapping[str, Any]
    stop_token_ids: tuple[int, ...]
    ignores_eos: bool
    unused: Mapping[str, tuple[Any, str]]


def ask_sampling(config: RolloutConfig) -> AskedSampling:
    """What a config's `rollout_vllm_sampling_kwargs` asks for. None means vLLM's default."""
    params: dict[str, Any] = {}
    unused: dict[str, tuple[Any, str]] = {}
    for key, value in entries_of(config, _FIELD).items():
        if value is None:
            continue
        if key in DECIDED or key == "n":
            decided = 1 if key == "n" else getattr(config, DECIDED[key])
            _check_decided(key, value, decided)
        elif key in WITHOUT_MEANING:
            unused[f"{_FIELD}[{key!r}]"] = value, WITHOUT_MEANING[key]
        else:
            params[RENAMED.get(key, key)] = value
    try:
        checked = SamplingParams.from_dict({"max_new_tokens": _MAX_TOKENS, **params})
    except InvalidRequestError as error:
        raise InvalidConfigError(f"RolloutConfig.{_FIELD}: {error}") from None
    for name in ("stop_token_ids", "ignore_eos"):
        params.pop(name, None)
    return AskedSampling(
        params=params,
        stop_token_ids=checked.stop_token_ids,
        ignores_eos=checked.ignore_eos,
        unused=unused,
    )


def with_training_kwargs(config: RolloutConfig, training: RolloutConfig) -> RolloutConfig:
    """A call's config, with the training config's sampling kwargs if it has none.

    Tunix's vLLM rollout takes them from the training config for all calls.
    """
    entries = entries_of(training, _FIELD)
    if entries_of(config, _FIELD) or not entries:
        return config
    return dataclasses.replace(config, **{_FIELD: entries})


def _check_decided(key: str, value: Any, decided: Any) -> None:
    if value == decided:
        return
    reason = "each prompt gets one completion"
    if key != "n":
        reason = f"RolloutConfig.{DECIDED[key]}={decided!r} decides, for the trainer too"
    raise InvalidConfigError(f"RolloutConfig.{_FIELD}[{key!r}] must not be {value!r}: {reason}")
