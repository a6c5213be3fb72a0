"""Gemma 2 (Gemma 2: Improving Open Language Models at a Practical Size, 2024).

Gemma with further norms after attention and MLP, soft caps, and a sliding window in every other
layer.
"""

from __future__ import annotations

from sgljax_engine.model_config import AttentionConfig, ModelConfig
from sgljax_engine.models import gemma, hf
from sgljax_engine.models.decoder import decoder

_SLIDING_PATTERN = 2

TRAITS = gemma.TRAITS._replace(has_post_norms=True)


def attention_config(config: hf.HfConfig, pattern: int) -> AttentionConfig:
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


def _config_from_hf(config: hf.HfConfig) -> ModelConfig:
    hf.check_settings(config, hidden_activation=gemma.GELU)
    return hf.dense_config(
        config,
        rope=hf.read_rope(config),
        tied_by_default=True,
        attention=attention_config(config, _SLIDING_PATTERN),
        final_logit_softcap=config.get("final_logit_softcapping"),
    )


MODEL = decoder(TRAITS, _config_from_hf)
