"""Llama 2, 3, 3.1 and 3.2, text only, Mistral 7B, v0.1 to v0.3, and Mixtral: GQA, RoPE, SwiGLU.

Sources: The Llama 3 Herd of Models (2024), Mistral 7B (2023), Mixtral of Experts (2024). Models of
Llama's architecture may have biases. Mistral's and Mixtral's layers may all slide. Mixtral has
experts in the place of each MLP.
"""

from __future__ import annotations

from sgljax_engine.model_config import ModelConfig, MoEConfig, RopeConfig
from sgljax_engine.models import hf
from sgljax_engine.models.decoder import decoder
from sgljax_engine.models.decoder_params import DecoderTraits
from sgljax_engine.models.hf_rope import read_rope

_LLAMA_DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
_MISTRAL_DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
_MIXTRAL_DEFAULTS = {
    **_MISTRAL_DEFAULTS,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}
"""Settings that a config may leave out, of transformers' classes; a null window is none."""


def _llama_config(config: hf.HfConfig) -> ModelConfig:
    config = hf.with_defaults(config, _LLAMA_DEFAULTS)
    hf.check_settings(config, hidden_act=hf.SILU)
    hf.check_full_attention(config)
    return hf.dense_config(
        config,
        rope=read_rope(config),
        tied_by_default=False,
        attention_bias=hf.flag(config, "attention_bias"),
        mlp_bias=hf.flag(config, "mlp_bias"),
    )


def _mistral_config(config: hf.HfConfig) -> ModelConfig:
    return _windowed_config(hf.with_defaults(config, _MISTRAL_DEFAULTS), read_rope(config))


def _mixtral_config(config: hf.HfConfig) -> ModelConfig:
    rope = read_rope(config, theta=1_000_000.0)
    # `num_experts` is another name in transformers' class.
    other = {"num_local_experts": config["num_experts"]} if "num_experts" in config else {}
    config = hf.with_defaults(config, {**_MIXTRAL_DEFAULTS, **other})
    moe = MoEConfig(
        num_experts=hf.require(config, "num_local_experts"),
        num_experts_per_token=hf.require(config, "num_experts_per_tok"),
        intermediate_size=hf.require(config, "intermediate_size"),
        norm_topk_prob=True,
    )
    return _windowed_config(config, rope, moe)


def _windowed_config(
    config: hf.HfConfig, rope: RopeConfig, moe: MoEConfig | None = None
) -> ModelConfig:
    hf.check_settings(config, hidden_act=hf.SILU)
    hf.warn_without_effect(config, "attention_bias", "mlp_bias")
    window = config["sliding_window"]
    # transformers slides in all layers or in none, whatever `layer_types` says.
    hf.check_layer_types(config, hf.FULL if window is None else hf.SLIDING)
    attention = hf.sliding_everywhere(config, window)
    return hf.dense_config(config, rope=rope, tied_by_default=False, attention=attention, moe=moe)


LLAMA = decoder(DecoderTraits(), _llama_config)
MISTRAL = decoder(DecoderTraits(), _mistral_config)
MIXTRAL = decoder(DecoderTraits(), _mixtral_config)
