"""Gemma, Gemma 2 and Gemma 3, text.

Gemma (Gemma: Open Models Based on Gemini Research and Technology, 2024): Llama's decoder with
GeGLU, scaled embeddings and norm weights stored minus one.

Gemma 2 (Gemma 2: Improving Open Language Models at a Practical Size, 2024): Gemma with further
norms after attention and MLP, soft caps, and a sliding window in every other layer.

Gemma 3 (Gemma 3 Technical Report, 2025): Gemma 2 with normalised queries and keys, five sliding
layers per layer with full attention, and a separate rotary embedding for the sliding layers. The
multimodal sizes hold the same language model, which is all that is loaded of them.
"""

from __future__ import annotations

import dataclasses
import functools
import logging

import jax

from sgljax_engine.model_config import AttentionConfig, ModelConfig, RopeConfig
from sgljax_engine.models import hf
from sgljax_engine.models.decoder import decoder
from sgljax_engine.models.decoder_params import DecoderTraits
from sgljax_engine.models.hf_rope import read_layer_rope, read_rope

logger = logging.getLogger(__name__)

GELU = "gelu_pytorch_tanh"
"""HF's name of the activation, the tanh approximation of GELU."""

TRAITS = DecoderTraits(
    activation=functools.partial(jax.nn.gelu, approximate=True),
    has_offset_norms=True,
    scales_embeddings=True,
)
_TRAITS2 = TRAITS._replace(has_post_norms=True)

_PATTERN2, _PATTERN3 = 2, 6
"""In a Gemma 2 every second layer has full attention, in a Gemma 3 every sixth."""

_DEFAULTS = {"head_dim": 256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6}
_GEMMA_DEFAULTS = {**_DEFAULTS, "num_key_value_heads": 16}
_GEMMA2_DEFAULTS = {
    **_DEFAULTS,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3_DEFAULTS = {
    **_DEFAULTS,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "vocab_size": 262_208,
}
"""Settings that a config may leave out, of transformers' classes."""

_THETAS = {hf.FULL: 1_000_000.0, hf.SLIDING: 10_000.0}
"""Bases of a Gemma 3 whose config names none."""


def _gemma_config(config: hf.HfConfig) -> ModelConfig:
    config = hf.with_defaults(config, _GEMMA_DEFAULTS)
    # transformers 4 reads `hidden_activation` where it is set, and `hidden_act` never.
    name = "hidden_act" if config.get("hidden_activation") is None else "hidden_activation"
    if name == "hidden_act" and config.get(name) == "gelu":
        logger.warning(
            "hidden_act='gelu', the slip of Gemma's first config.json, is read as %s", GELU
        )
        hf.check_settings(config)
    else:
        hf.check_settings(config, **{name: GELU})
    hf.check_full_attention(config)
    hf.warn_without_effect(config, "mlp_bias")
    return hf.dense_config(
        config,
        rope=read_rope(config),
        tied_by_default=True,
        attention_bias=hf.flag(config, "attention_bias"),
    )


def _gemma2_config(config: hf.HfConfig) -> ModelConfig:
    config = hf.with_defaults(config, _GEMMA2_DEFAULTS)
    return _windowed_config(config, read_rope(config), _attention_config(config, _PATTERN2))


def _gemma3_config(config: hf.HfConfig) -> ModelConfig:
    config = hf.with_defaults(config, _GEMMA3_DEFAULTS)
    hf.check_settings(config, partial_rotary_factor=1.0)
    attention = _attention_config(config, config.get("sliding_window_pattern", _PATTERN3))
    sliding = _rope3(config, hf.SLIDING, config.get("rope_local_base_freq"))
    attention = dataclasses.replace(attention, sliding_rope=sliding)
    return _windowed_config(config, _rope3(config, hf.FULL, config.get("rope_theta")), attention)


def _rope3(config: hf.HfConfig, kind: str, theta: float | None) -> RopeConfig:
    return read_layer_rope(config, kind, _THETAS[kind] if theta is None else theta)


def _windowed_config(
    config: hf.HfConfig, rope: RopeConfig, attention: AttentionConfig
) -> ModelConfig:
    hf.check_settings(config, hidden_activation=GELU)
    hf.warn_without_effect(config, "mlp_bias")
    return hf.dense_config(
        config,
        rope=rope,
        tied_by_default=True,
        attention=attention,
        final_logit_softcap=config.get("final_logit_softcapping"),
        attention_bias=hf.flag(config, "attention_bias"),
    )


def _multimodal_config(config: hf.HfConfig) -> ModelConfig:
    return _gemma3_config(hf.text_config(config, "Gemma3ForCausalLM"))


def _attention_config(config: hf.HfConfig, pattern: int) -> AttentionConfig:
    """The attention of the layers of a Gemma 2 or 3."""
    sliding = hf.sliding_layers(config, pattern)
    return AttentionConfig(
        scale=hf.number("query_pre_attn_scalar", hf.require(config, "query_pre_attn_scalar"))
        ** -0.5,
        logit_softcap=config.get("attn_logit_softcapping"),
        sliding_window=hf.require(config, "sliding_window") if any(sliding) else None,
        sliding_layers=sliding,
    )


GEMMA = decoder(TRAITS, _gemma_config)
GEMMA2 = decoder(_TRAITS2, _gemma2_config)
GEMMA3 = decoder(_TRAITS2._replace(has_qk_norm=True), _gemma3_config)
GEMMA3_MULTIMODAL = GEMMA3._replace(config_from_hf=_multimodal_config)
