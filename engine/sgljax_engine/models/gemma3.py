"""Gemma 3, text (Gemma 3 Technical Report, 2025).

Gemma 2 with normalised queries and keys, five sliding layers per layer with full attention, and a
separate rotary embedding for the sliding layers. The multimodal sizes hold the same language model,
which is all that is loaded of them.
"""

from __future__ import annotations

import dataclasses

from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models import gemma, gemma2, hf
from sgljax_engine.models.decoder import decoder

_SLIDING_PATTERN = 6

_TEXT_DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": gemma.GELU,
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


def _config_from_hf(config: hf.HfConfig) -> ModelConfig:
    hf.check_settings(config, hidden_activation=gemma.GELU)
    # transformers 5 nests one embedding per type of layer; 4 has top-level names for both.
    nested = config.get("rope_parameters") or {}
    full = config.get("rope_scaling") or nested.get(hf.FULL) or {}
    theta = (nested.get(hf.FULL) or {}).get("rope_theta", config.get("rope_theta"))
    sliding_rope = hf.parse_rope(nested.get(hf.SLIDING) or {}, config.get("rope_local_base_freq"))
    pattern = config.get("sliding_window_pattern") or _SLIDING_PATTERN
    attention = gemma2.attention_config(config, pattern)
    return hf.dense_config(
        config,
        rope=hf.parse_rope(full, theta),
        tied_by_default=True,
        attention=dataclasses.replace(attention, sliding_rope=sliding_rope),
        final_logit_softcap=config.get("final_logit_softcapping"),
    )


def _config_from_multimodal(config: hf.HfConfig) -> ModelConfig:
    return _config_from_hf(hf.text_config(config, "Gemma3ForCausalLM", _TEXT_DEFAULTS))


MODEL = decoder(gemma2.TRAITS._replace(has_qk_norm=True), _config_from_hf)
MULTIMODAL = MODEL._replace(config_from_hf=_config_from_multimodal)
