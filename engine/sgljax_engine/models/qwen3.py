"""Qwen3, dense (Qwen3 Technical Report, 2025): Llama's decoder with normalised queries and keys."""

from __future__ import annotations

from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models import hf
from sgljax_engine.models.decoder import decoder
from sgljax_engine.models.decoder_params import DecoderTraits


def _config_from_hf(config: hf.HfConfig) -> ModelConfig:
    hf.check_settings(config, hidden_act="silu")
    hf.check_full_attention(config)
    return hf.dense_config(config, rope=hf.read_rope(config), tied_by_default=False)


MODEL = decoder(DecoderTraits(has_qk_norm=True), _config_from_hf)
