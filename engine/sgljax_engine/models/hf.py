"""Reads Hugging Face's config.json, as transformers 4 and 5 write it; shared by all models.

A setting known to change a model's results is either read or refused by name. Settings that only
concern training, generation or speed, or that no model here has, are ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from sgljax_engine.checks import check_count, check_positive
from sgljax_engine.checks import require as check
from sgljax_engine.errors import InvalidConfigError, UnsupportedModelError
from sgljax_engine.model_config import (
    AttentionConfig,
    LinearAttentionConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
)
from sgljax_engine.weights.hf_json import end_ids

logger = logging.getLogger(__name__)

HfConfig = Mapping[str, Any]
"""The contents of a config.json."""

_ONLY_SUPPORTED: dict[str, Any] = {
    "dual_chunk_attention_config": None,
    "quantization_config": None,
    "use_bidirectional_attention": False,
    "use_sliding_window": False,
}

_OF_THE_WHOLE = ("eos_token_id", "quantization_config")
"""Settings that a multimodal model's config.json has outside `text_config`, where they decide."""

_PLAIN_ATTENTION = AttentionConfig()

SILU = ("silu", "swish")
"""Names of one activation."""

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
"""The entries of `layer_types`."""


def require(hf: HfConfig, name: str) -> Any:
    """The value of a setting; InvalidConfigError when it is absent or null."""
    if hf.get(name) is None:
        raise InvalidConfigError(f"config.json has no {name!r}")
    return hf[name]


def with_defaults(hf: HfConfig, defaults: HfConfig) -> HfConfig:
    """A config with the settings of transformers' class that it leaves out; null stays null."""
    return {**defaults, **hf}


def text_config(hf: HfConfig, architecture: str) -> HfConfig:
    """The config of the language model under `text_config` in a multimodal config.json.

    Whether embeddings are tied the whole config says, never `text_config`: it is the outer class
    that has both tables.
    """
    text = {**require(hf, "text_config"), "architectures": [architecture]}
    outer = {name: hf[name] for name in _OF_THE_WHOLE if hf.get(name) is not None}
    return {**text, **outer, "tie_word_embeddings": hf.get("tie_word_embeddings")}


def require_any(hf: HfConfig, *names: str) -> Any:
    """The first of several names of one setting that is there; as `require`, by the first name."""
    return require(hf, next((name for name in names if hf.get(name) is not None), names[0]))


def check_settings(hf: HfConfig, **supported: Any) -> None:
    """Refuses settings that no model implements, and settings in `supported` with another value.

    A tuple lists names of the same value. An absent or null setting passes: transformers then takes
    its default, which must be the supported value.
    """
    for name, only in {**_ONLY_SUPPORTED, **supported}.items():
        value = hf.get(name)
        values = only if isinstance(only, tuple) else (only,)
        if value is not None and value not in values:
            raise UnsupportedModelError(f"{name}={value!r} is not supported, only {values[0]!r}")


def check_full_attention(hf: HfConfig) -> None:
    check_layer_types(hf, FULL)


def check_layer_types(hf: HfConfig, only: str) -> None:
    """Refuses `layer_types` other than `only`, for models whose layers are all of one type."""
    kinds = hf.get("layer_types")
    if kinds is None:
        return
    check_list("layer_types", kinds)
    for kind in kinds:
        if kind != only:
            raise UnsupportedModelError(f"layer_types {kind!r} is not supported, only {only!r}")


def check_list(name: str, value: Any) -> None:
    is_list = isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value)
    check(is_list, name, value, "a list of names")


def sliding_everywhere(hf: HfConfig, window: int | None) -> AttentionConfig:
    """Attention with the same window in all layers; None for no window."""
    if window is None:
        return _PLAIN_ATTENTION
    num_layers = require(hf, "num_hidden_layers")
    check_count("num_hidden_layers", num_layers)
    return AttentionConfig(sliding_window=window, sliding_layers=(True,) * num_layers)


def sliding_layers(hf: HfConfig, pattern: int) -> tuple[bool, ...]:
    """Whether each layer slides: from `layer_types`, else all but every pattern-th."""
    return _layers_of_kind(hf, SLIDING, pattern)


def linear_layers(hf: HfConfig, pattern: int) -> tuple[bool, ...]:
    """Whether each layer has linear attention; arguments and errors are as of `sliding_layers`."""
    return _layers_of_kind(hf, LINEAR, pattern)


def _layers_of_kind(hf: HfConfig, kind: str, pattern: int) -> tuple[bool, ...]:
    num_layers = require(hf, "num_hidden_layers")
    kinds = hf.get("layer_types")
    check_count("num_hidden_layers", num_layers)
    if kinds is None:
        check_count("the pattern of layers", pattern)
        return tuple((i + 1) % pattern != 0 for i in range(num_layers))
    check_list("layer_types", kinds)
    unknown = set(kinds) - {kind, FULL}
    if unknown:
        raise UnsupportedModelError(
            f"layer_types {sorted(unknown)[0]!r} is not supported, only {kind!r} and {FULL!r}"
        )
    if len(kinds) != num_layers:
        raise InvalidConfigError(
            f"layer_types must name num_hidden_layers ({num_layers}) types, got {len(kinds)}"
        )
    return tuple(each == kind for each in kinds)


def dense_config(
    hf: HfConfig,
    *,
    rope: RopeConfig,
    tied_by_default: bool,
    attention: AttentionConfig = _PLAIN_ATTENTION,
    final_logit_softcap: float | None = None,
    per_layer_input_size: int = 0,
    shared_kv_intermediate_size: int | None = None,
    moe: MoEConfig | None = None,
    linear_attention: LinearAttentionConfig | None = None,
    attention_bias: bool = False,
    mlp_bias: bool = False,
) -> ModelConfig:
    """Builds the config from the fields that all models name alike, and those given."""
    hidden_size, num_heads = require(hf, "hidden_size"), require(hf, "num_attention_heads")
    for name, value in (("hidden_size", hidden_size), ("num_attention_heads", num_heads)):
        check_count(name, value)
    kv_heads, head_dim = hf.get("num_key_value_heads"), hf.get("head_dim")
    tied = hf.get("tie_word_embeddings")
    tied = tied_by_default if tied is None else tied
    context_length = require(hf, "max_position_embeddings")
    if rope.yarn is not None:  # model cards add it, and leave max_position_embeddings as it was
        check_count("context_length", context_length)
        context_length = max(context_length, rope.yarn.context_length)
    check(isinstance(tied, bool), "tie_word_embeddings", tied, "true or false")
    return ModelConfig(
        architecture=require(hf, "architectures")[0],
        vocab_size=require(hf, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=require(hf, "intermediate_size"),
        num_layers=require(hf, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads if kv_heads is None else kv_heads,
        head_dim=hidden_size // num_heads if head_dim is None else head_dim,
        rope=rope,
        rms_norm_eps=number("rms_norm_eps", require(hf, "rms_norm_eps")),
        tie_word_embeddings=tied,
        context_length=context_length,
        eos_token_ids=end_ids(hf.get("eos_token_id")),
        attention=attention,
        final_logit_softcap=final_logit_softcap,
        per_layer_input_size=per_layer_input_size,
        shared_kv_intermediate_size=shared_kv_intermediate_size,
        moe=moe,
        linear_attention=linear_attention,
        attention_bias=attention_bias,
        mlp_bias=mlp_bias,
    )


def number(name: str, value: Any) -> float:
    check_positive(name, value)
    return float(value)


def flag(hf: HfConfig, name: str) -> bool:
    value = hf.get(name)
    check(value is None or isinstance(value, bool), name, value, "true or false")
    return bool(value)


def warn_without_effect(hf: HfConfig, *names: str) -> None:
    """Warns of settings that the architecture's class in transformers does not have."""
    for name in names:
        if hf.get(name):
            logger.warning("config.json: %s=%r has no effect on this architecture", name, hf[name])
