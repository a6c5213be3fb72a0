"""Llama 2, 3, 3.1 and 3.2, text only, and Mistral 7B, v0.1 to v0.3: GQA, RoPE, SwiGLU.

Sources: The Llama 3 Herd of Models (2024), Mistral 7B (2023). Models of Llama's architecture may
have biases. Mistral's layers may all slide.
"""

from __future__ import annotations

from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models import hf
from sgljax_engine.models.decoder import decoder
from sgljax_engine.models.decoder_params import DecoderTraits

_LLAMA_DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
_MISTRAL_DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
"""Settings that a config may leave out, of transformers' classes; a null window is none."""


def _llama_config(config: hf.HfConfig) -> ModelConfig:
    config = hf.with_defaults(config, _LLAMA_DEFAULTS)
    hf.check_settings(config, hidden_act=hf.SILU)
    hf.check_full_attention(config)
    return hf.dense_config(
        config,
        rope=hf.read_rope(config),
        tied_by_default=False,
        attention_bias=hf.flag(config, "attention_bias"),
        mlp_bias=hf.flag(config, "mlp_bias"),
    )


def _mistral_config(config: hf.HfConfig) -> ModelConfig:
    config = hf.with_defaults(config, _MISTRAL_DEFAULTS)
    hf.check_settings(config, hidden_act=hf.SILU)
    hf.warn_without_effect(config, "attention_bias", "mlp_bias")
    window = config["sliding_window"]
    # transformers slides in all layers or in none, whatever `layer_types` says.
    hf.check_layer_types(config, hf.FULL if window is None else hf.SLIDING)
    attention = hf.sliding_everywhere(config, window)
    rope = hf.read_rope(config)
    return hf.dense_config(config, rope=rope, tied_by_default=False, attention=attention)


LLAMA = decoder(DecoderTraits(), _llama_config)
MISTRAL = decoder(DecoderTraits(), _mistral_config)
