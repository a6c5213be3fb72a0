"""Gemma 3, text (Gemma 3 Technical Report, 2025).

Gemma 2 with normalised queries and keys, five sliding layers per layer with full attention, and a
separate rotary embedding for the sliding layers.
"""

from __future__ import annotations

import dataclasses

from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models import gemma, gemma2, hf
from sgljax_engine.models.decoder import decoder

_SLIDING_PATTERN = 6


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


MODEL = decoder(gemma2.TRAITS._replace(has_qk_norm=True), _config_from_hf)
