"""gpt-oss: sinks in every attention, windows in every other layer, experts with biases.

Source: gpt-oss-120b and gpt-oss-20b Model Card (OpenAI, 2025). The weights of the experts may be
MXFP4, which are dequantised when they are loaded; see `weights.mxfp4`.
"""

from __future__ import annotations

from sgljax_engine.model_config import AttentionConfig, ModelConfig, MoEConfig
from sgljax_engine.models import hf
from sgljax_engine.models.decoder import decoder
from sgljax_engine.models.decoder_params import DecoderTraits
from sgljax_engine.models.hf_rope import read_rope

_LIMIT = 7.0
"""`swiglu_limit`, which transformers does not read."""

_THETA = 150_000.0

_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
    "sliding_window": 128,
    "num_experts_per_tok": 4,
    "attention_bias": True,
}
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Settings that a config may leave out, of transformers' class."""


def _config(config: hf.HfConfig) -> ModelConfig:
    config = hf.with_defaults(config, _DEFAULTS)
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        config = {**config, "rope_parameters": _ROPE}
    quantized = config.get("quantization_config")
    if isinstance(quantized, dict) and quantized.get("quant_method") == "mxfp4":
        config = {**config, "quantization_config": None}  # tensors tell how each is stored
    hf.warn_without_effect(config, "mlp_bias")
    hf.check_settings(config, hidden_act=hf.SILU, swiglu_limit=_LIMIT)
    moe = MoEConfig(
        num_experts=hf.require_any(config, "num_local_experts", "num_experts"),
        num_experts_per_token=hf.require(config, "num_experts_per_tok"),
        intermediate_size=hf.require(config, "intermediate_size"),
        norm_topk_prob=True,
        has_bias=True,
        swiglu_limit=_LIMIT,
    )
    attention = AttentionConfig(
        sliding_window=config["sliding_window"], sliding_layers=hf.sliding_layers(config, 2)
    )
    return hf.dense_config(
        config,
        rope=read_rope(config, theta=_THETA),
        tied_by_default=False,
        attention=attention,
        attention_bias=hf.flag(config, "attention_bias"),
        moe=moe,
    )


MODEL = decoder(DecoderTraits(has_sinks=True, router="router"), _config)
