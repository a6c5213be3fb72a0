"""Qwen2 and Qwen2.5, dense (Qwen2 Technical Report, 2024): Llama's decoder with q, k, v biases."""

from __future__ import annotations

from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models import hf
from sgljax_engine.models.decoder import decoder
from sgljax_engine.models.decoder_params import DecoderTraits


def _config_from_hf(config: hf.HfConfig) -> ModelConfig:
    hf.check_settings(config, hidden_act="silu")
    hf.check_full_attention(config)
    return hf.dense_config(config, rope=hf.read_rope(config), tied_by_default=False)


MODEL = decoder(DecoderTraits(has_qkv_bias=True), _config_from_hf)
