"""Qwen2 and Qwen2.5, dense; Qwen3, dense and with experts in the place of each MLP.

Llama's decoder with biases on queries, keys and values (Qwen2 Technical Report, 2024), or with
normalised queries and keys (Qwen3 Technical Report, 2025).
"""

from __future__ import annotations

from sgljax_engine.errors import UnsupportedModelError
from sgljax_engine.model_config import ModelConfig, MoEConfig
from sgljax_engine.models import hf
from sgljax_engine.models.decoder import decoder
from sgljax_engine.models.decoder_params import DecoderTraits


def _dense_config(config: hf.HfConfig) -> ModelConfig:
    hf.check_settings(config, hidden_act="silu")
    hf.check_full_attention(config)
    return hf.dense_config(config, rope=hf.read_rope(config), tied_by_default=False)


def _moe_config(config: hf.HfConfig) -> ModelConfig:
    hf.check_settings(config, hidden_act="silu", decoder_sparse_step=1)
    hf.check_full_attention(config)
    if config.get("mlp_only_layers"):
        raise UnsupportedModelError(
            f"mlp_only_layers={config['mlp_only_layers']!r} is not supported, only []: all layers "
            "must have experts"
        )
    moe = MoEConfig(
        num_experts=hf.require_any(config, "num_experts", "num_local_experts"),
        num_experts_per_token=hf.require(config, "num_experts_per_tok"),
        intermediate_size=hf.require(config, "moe_intermediate_size"),
        norm_topk_prob=bool(config.get("norm_topk_prob")),
    )
    # config.json's own intermediate_size is that of MLPs which no layer has.
    config = {**config, "intermediate_size": moe.intermediate_size}
    return hf.dense_config(config, rope=hf.read_rope(config), tied_by_default=False, moe=moe)


QWEN2 = decoder(DecoderTraits(has_qkv_bias=True), _dense_config)
QWEN3 = decoder(DecoderTraits(has_qk_norm=True), _dense_config)
QWEN3_MOE = decoder(DecoderTraits(has_qk_norm=True), _moe_config)
