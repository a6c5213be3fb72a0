"""Sampling settings of a rollout, from RolloutConfig and the rollout's own keywords."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import numpy as np
from tunix.rl.rollout.base_rollout import RolloutConfig

from sgljax_engine import (
    InvalidConfigError,
    InvalidRequestError,
    RequestOutput,
    SamplingParams,
)
from tunix_sgljax.rollout_config.vllm_sampling import ask_sampling

_MIN_SEED, _MAX_SEED = -(2**63), 2**63 - 1

_FROM_CONFIG = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "max_new_tokens",
    "seed",
    "stop_token_ids",
    "ignore_eos",
)
"""Sampling fields that RolloutConfig sets, or that a rollout does not use."""

LOGPROBS_MODES = ("trainer_logprobs", "trainer_match", "processed_logprobs", "raw_logprobs")
"""Which log-probs a rollout returns. The last two have vLLM's names."""

WeightUpdateMode = Literal["retract", "in_place", "wait", "abort"]
"""What a weight update does to completions that are being sampled; see `SglJaxRollout`."""


def apply_log_level(config: RolloutConfig) -> None:
    """Sets the log level of our packages if the config names another than "info"."""
    level = config.rollout_sglang_jax_log_level
    if level is None or level == "info":
        return
    for name in ("sgljax_cpu", "sgljax_engine", "tunix_sgljax"):
        try:
            logging.getLogger(name).setLevel(level.upper())
        except ValueError:
            raise InvalidConfigError(
                "RolloutConfig.rollout_sglang_jax_log_level must name a logging level, got "
                f"{level!r}"
            ) from None


def check_extra_params(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Checks sampling fields beyond RolloutConfig's, for all calls of a rollout."""
    for name in _FROM_CONFIG:
        if name in extra:
            raise InvalidConfigError(
                f"sampling_params must not hold {name!r}, got {extra[name]!r}: RolloutConfig "
                "decides it for each call"
            )
    if extra.get("detokenize") is False:
        raise InvalidConfigError(
            "sampling_params must not set detokenize=False: reward functions read the text"
        )
    # max_new_tokens, which each call sets, bounds min_new_tokens.
    SamplingParams.from_dict({"max_new_tokens": _MAX_SEED, **extra})
    return dict(extra)


def check_logprobs_mode(mode: str | None) -> str | None:
    if mode not in (None, *LOGPROBS_MODES):
        raise InvalidConfigError(f"logprobs_mode must be one of {LOGPROBS_MODES}, got {mode!r}")
    return mode


def check_match_batch_size(size: int | None, mode: str | None) -> int | None:
    if size is None:
        return None
    if mode != "trainer_match":
        raise InvalidConfigError(
            f"match_batch_size={size!r} needs logprobs_mode='trainer_match', got {mode!r}"
        )
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InvalidConfigError(f"match_batch_size must be None or >= 1, got {size!r}")
    return size


def check_comparable(mode: str, params: SamplingParams) -> None:
    """Refuses log-probs that cannot be compared with a trainer's."""
    reason = ""
    if mode == "raw_logprobs" and params.temperature not in (0.0, 1.0):
        reason = f"of softmax(logits), with temperature={params.temperature}"
    if mode == "processed_logprobs":
        if params.temperature == 0.0:
            reason = "0 for every token, with temperature=0"
        elif params.top_k not in (-1, None) or params.top_p < 1.0 or params.min_p > 0.0:
            reason = (
                f"of a filtered distribution, with top_k={params.top_k}, top_p={params.top_p}, "
                f"min_p={params.min_p}"
            )
        elif params.changes_logits:
            reason = "of penalised, biased or restricted logits"
    if reason:
        raise InvalidConfigError(
            f"logprobs_mode={mode!r} gives log-probs {reason}; a trainer computes those of "
            "softmax(logits / temperature), so comparing them says nothing. Use "
            "'trainer_logprobs' or 'trainer_match'"
        )


def check_weight_update_mode(mode: str) -> None:
    modes = get_args(WeightUpdateMode)
    if mode not in modes:
        raise InvalidConfigError(f"weight_update_mode must be one of {modes}, got {mode!r}")


def check_flag(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise InvalidConfigError(f"{name} must be True or False, got {value!r}")
    return value


def pick_logprobs(output: RequestOutput, mode: str) -> list[float]:
    if mode == "raw_logprobs":
        return output.logprobs
    if mode == "processed_logprobs":
        return output.processed_logprobs
    return output.scaled_logprobs


def to_sampling_params(
    config: RolloutConfig,
    *,
    end_ids: Sequence[int],
    seed: int | None,
    extra: Mapping[str, Any] | None = None,
    shows_special_tokens: bool = False,
) -> SamplingParams:
    """The sampling parameters of one prompt.

    `top_p=None` means 1.0 (no filtering), as its type suggests; `top_k` None, -1 or 0 keep all
    tokens, as in Tunix's vanilla sampler. Generation stops at `eos_tokens` if given, else at
    `end_ids`, and at `stop_token_ids` of `rollout_vllm_sampling_kwargs`. The text is that of
    Tunix's samplers: decoded without the prompt, and with special tokens if the tokenizer can leave
    them in. `extra` overrides `rollout_vllm_sampling_kwargs`; the seed is unique already.
    """
    asked = ask_sampling(config)
    own = () if asked.ignores_eos else end_ids
    stop = config.eos_tokens if config.eos_tokens is not None else own
    max_tokens = config.max_tokens_to_generate
    if max_tokens < 1:
        raise InvalidRequestError(
            f"RolloutConfig.max_tokens_to_generate must be >= 1, got {max_tokens}"
        )
    return SamplingParams.from_dict(
        {
            "decode_behind_prompt": False,
            "skip_special_tokens": not shows_special_tokens,
            **asked.params,
            **(extra or {}),
            "temperature": config.temperature,
            "top_p": 1.0 if config.top_p is None else config.top_p,
            "top_k": config.top_k,
            "max_new_tokens": max_tokens,
            "seed": seed,
            "stop_token_ids": tuple(dict.fromkeys((*stop, *asked.stop_token_ids))),
            "ignore_eos": True,
        }
    )


def seed_to_int(seed: Any) -> int | None:
    """`RolloutConfig.seed` as an integer: None, an int, or a JAX key (typed or raw).

    -1 is None, as in vLLM.
    """
    if seed is None:
        return None
    if isinstance(seed, (int, np.integer)):
        if not _MIN_SEED <= seed <= _MAX_SEED:
            raise InvalidConfigError(
                f"RolloutConfig.seed must be in [-2**63, 2**63 - 1], got {seed}"
            )
        return None if seed == -1 else int(seed)
    if isinstance(seed, jax.Array) and jax.numpy.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    words = np.asarray(seed).ravel()
    if not np.issubdtype(words.dtype, np.integer) or words.size == 0:
        raise InvalidConfigError(f"RolloutConfig.seed must be an int or a JAX key, got {seed!r}")
    value = 0
    for word in words.tolist():
        value = (value << 32) | (int(word) & 0xFFFFFFFF)
    return value & _MAX_SEED
