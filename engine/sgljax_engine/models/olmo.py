"""OLMo 2 and OLMo 3.

OLMo 2 (2 OLMo 2 Furious, 2024): Llama's decoder with norms behind attention and MLP in the place of
those before them, and queries and keys that are normalised over all heads together.

OLMo 3 (2025): OLMo 2 with a sliding window in three of four layers, whose rotary embedding is not
stretched.
"""

from __future__ import annotations

from sgljax_engine.model_config import AttentionConfig, ModelConfig, RopeConfig
from sgljax_engine.models import hf
from sgljax_engine.models.decoder import decoder
from sgljax_engine.models.decoder_params import DecoderTraits
from sgljax_engine.models.hf_rope import read_layer_rope, read_rope

_TRAITS = DecoderTraits(
    has_qk_norm=True, normalizes_whole_qk=True, has_pre_norms=False, has_post_norms=True
)
_DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
_OLMO3_DEFAULTS = {**_DEFAULTS, "sliding_window": 4096}
"""Settings that a config may leave out, of transformers' classes."""

_PATTERN, _THETA = 4, 500_000.0
"""Of OLMo 3: every fourth layer has full attention; the base that a config need not name."""


def _olmo2_config(config: hf.HfConfig) -> ModelConfig:
    hf.check_full_attention(config)
    return _config(hf.with_defaults(config, _DEFAULTS), read_rope(config), AttentionConfig())


def _olmo3_config(config: hf.HfConfig) -> ModelConfig:
    config = hf.with_defaults(config, _OLMO3_DEFAULTS)
    # transformers 4 to 5.12 has this base in all layers, later versions in those with full
    # attention; and settings for all layers are ignored by the latter.
    hf.check_settings(config, rope_theta=_THETA, partial_rotary_factor=1.0)
    if config.get("rope_parameters") == {"rope_type": "default", "rope_theta": _THETA}:
        config = {**config, "rope_parameters": None}
    sliding = hf.sliding_layers(config, _PATTERN)
    attention = AttentionConfig(
        sliding_window=hf.require(config, "sliding_window") if any(sliding) else None,
        sliding_layers=sliding,
        sliding_rope=read_layer_rope(config, hf.SLIDING, _THETA),
    )
    return _config(config, read_layer_rope(config, hf.FULL, _THETA), attention)


def _config(config: hf.HfConfig, rope: RopeConfig, attention: AttentionConfig) -> ModelConfig:
    hf.check_settings(config, hidden_act=hf.SILU)
    hf.warn_without_effect(config, "mlp_bias")
    return hf.dense_config(
        config,
        rope=rope,
        tied_by_default=False,
        attention=attention,
        attention_bias=hf.flag(config, "attention_bias"),
    )


OLMO2 = decoder(_TRAITS, _olmo2_config)
OLMO3 = decoder(_TRAITS, _olmo3_config)
