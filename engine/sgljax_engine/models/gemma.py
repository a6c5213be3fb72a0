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

from sgljax_engine.model_config import AttentionConfig, ModelConfig
from sgljax_engine.models import hf
from sgljax_engine.models.decoder import decoder
from sgljax_engine.models.decoder_params import DecoderTraits

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

_TEXT_DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": GELU,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10_000.0,
    "rope_theta": 1_000_000.0,
    "vocab_size": 262_208,
}
"""Settings that the multimodal models' `text_config` leaves out; transformers' Gemma3TextConfig."""


def _gemma_config(config: hf.HfConfig) -> ModelConfig:
    # transformers 4 reads `hidden_activation` where it is set, and `hidden_act` never.
    name = "hidden_act" if config.get("hidden_activation") is None else "hidden_activation"
    if name == "hidden_act" and config.get(name) == "gelu":
        logger.warning(
            "hidden_act='gelu', the slip of Gemma's first config.json, is read as %s", GELU
        )
    else:
        hf.check_settings(config, **{name: GELU})
    hf.check_full_attention(config)
    return hf.dense_config(config, rope=hf.read_rope(config), tied_by_default=True)


def _gemma2_config(config: hf.HfConfig) -> ModelConfig:
    hf.check_settings(config, hidden_activation=GELU)
    return hf.dense_config(
        config,
        rope=hf.read_rope(config),
        tied_by_default=True,
        attention=_attention_config(config, _PATTERN2),
        final_logit_softcap=config.get("final_logit_softcapping"),
    )


def _gemma3_config(config: hf.HfConfig) -> ModelConfig:
    hf.check_settings(config, hidden_activation=GELU)
    # transformers 5 nests one embedding per type of layer; 4 has top-level names for both.
    nested = config.get("rope_parameters") or {}
    full = config.get("rope_scaling") or nested.get(hf.FULL) or {}
    theta = (nested.get(hf.FULL) or {}).get("rope_theta", config.get("rope_theta"))
    sliding_rope = hf.parse_rope(nested.get(hf.SLIDING) or {}, config.get("rope_local_base_freq"))
    attention = _attention_config(config, config.get("sliding_window_pattern") or _PATTERN3)
    return hf.dense_config(
        config,
        rope=hf.parse_rope(full, theta),
        tied_by_default=True,
        attention=dataclasses.replace(attention, sliding_rope=sliding_rope),
        final_logit_softcap=config.get("final_logit_softcapping"),
    )


def _multimodal_config(config: hf.HfConfig) -> ModelConfig:
    return _gemma3_config(hf.text_config(config, "Gemma3ForCausalLM", _TEXT_DEFAULTS))


def _attention_config(config: hf.HfConfig, pattern: int) -> AttentionConfig:
    """The attention of the layers of a Gemma 2 or 3.

    Args:
        config: The config.json.
        pattern: Every `pattern`-th layer has full attention, unless `layer_types` says otherwise.
    """
    sliding = hf.sliding_layers(config, pattern)
    return AttentionConfig(
        scale=float(hf.require(config, "query_pre_attn_scalar")) ** -0.5,
        logit_softcap=config.get("attn_logit_softcapping"),
        sliding_window=hf.require(config, "sliding_window") if any(sliding) else None,
        sliding_layers=sliding,
    )


GEMMA = decoder(TRAITS, _gemma_config)
GEMMA2 = decoder(_TRAITS2, _gemma2_config)
GEMMA3 = decoder(_TRAITS2._replace(has_qk_norm=True), _gemma3_config)
GEMMA3_MULTIMODAL = GEMMA3._replace(config_from_hf=_multimodal_config)
