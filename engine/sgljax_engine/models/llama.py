"""Llama 2, 3, 3.1 and 3.2, text only (The Llama 3 Herd of Models, 2024): GQA, RoPE, SwiGLU.

Models of the same architecture may have biases.
"""

from __future__ import annotations

import dataclasses

from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models import hf
from sgljax_engine.models.decoder import decoder
from sgljax_engine.models.decoder_params import DecoderTraits


def _config_from_hf(config: hf.HfConfig) -> ModelConfig:
    bias = {name: bool(config.get(name)) for name in ("attention_bias", "mlp_bias")}
    hf.check_settings(config, hidden_act="silu", **bias)
    hf.check_full_attention(config)
    # Llama 2's config.json names no base; it predates the setting.
    rope = hf.read_rope(config, default_theta=10_000.0)
    model = hf.dense_config(config, rope=rope, tied_by_default=False)
    return dataclasses.replace(model, **bias)


MODEL = decoder(DecoderTraits(), _config_from_hf)
