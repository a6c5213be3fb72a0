"""Llama 2, 3, 3.1 and 3.2, text only, and Mistral 7B, v0.1 to v0.3: GQA, RoPE, SwiGLU.

Sources: The Llama 3 Herd of Models (2024), Mistral 7B (2023). Models of Llama's architecture may
have biases. Mistral's layers may all slide.
"""

from __future__ import annotations

import dataclasses

from sgljax_engine.model_config import AttentionConfig, ModelConfig
from sgljax_engine.models import hf
from sgljax_engine.models.decoder import decoder
from sgljax_engine.models.decoder_params import DecoderTraits

_DEFAULT_WINDOW = 4096
"""Window of a Mistral without `sliding_window`; null is no window, as in v0.2 and v0.3."""


def _llama_config(config: hf.HfConfig) -> ModelConfig:
    bias = {name: bool(config.get(name)) for name in ("attention_bias", "mlp_bias")}
    hf.check_settings(config, hidden_act="silu", **bias)
    hf.check_full_attention(config)
    # Llama 2's config.json names no base; it predates the setting.
    rope = hf.read_rope(config, default_theta=10_000.0)
    model = hf.dense_config(config, rope=rope, tied_by_default=False)
    return dataclasses.replace(model, **bias)


def _mistral_config(config: hf.HfConfig) -> ModelConfig:
    hf.check_settings(config, hidden_act="silu")
    window = config.get("sliding_window", _DEFAULT_WINDOW)
    # transformers slides in all layers or in none, whatever `layer_types` says.
    hf.check_layer_types(config, hf.FULL if window is None else hf.SLIDING)
    attention = AttentionConfig()
    if window is not None:
        num_layers = hf.require(config, "num_hidden_layers")
        attention = AttentionConfig(sliding_window=window, sliding_layers=(True,) * num_layers)
    rope = hf.read_rope(config, default_theta=10_000.0)
    return hf.dense_config(config, rope=rope, tied_by_default=False, attention=attention)


LLAMA = decoder(DecoderTraits(), _llama_config)
MISTRAL = decoder(DecoderTraits(), _mistral_config)
