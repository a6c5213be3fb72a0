"""Qwen3-Next and Qwen3.5, dense and with experts: three layers in four are gated delta nets.

Qwen3's decoder with gated delta nets (Yang et al., 2024, arXiv 2412.06464) in the place of most
attention. What attention is left has a gate on its output and turns a part of each head. Norm
weights are stored minus one, but for those of the nets. Experts have a shared one beside them. Of a
multimodal checkpoint the language model is all that is loaded: without images its three axes of
positions are equal, so that its rotary embedding is the plain one.
"""

from __future__ import annotations

from typing import Any

from sgljax_engine.errors import UnsupportedModelError
from sgljax_engine.model_config import LinearAttentionConfig, ModelConfig, MoEConfig
from sgljax_engine.models import hf
from sgljax_engine.models.decoder import decoder
from sgljax_engine.models.decoder_params import DecoderTraits
from sgljax_engine.models.hf_rope import read_rope

_NETS = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
"""Settings of the nets that a config may leave out; of all three classes of transformers."""

_DEFAULTS: dict[str, Any] = {
    **_NETS,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32_768,
    "num_attention_heads": 16,
    "partial_rotary_factor": 0.25,
}
_NEXT_DEFAULTS = {
    **_DEFAULTS,
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
}
_DENSE_DEFAULTS = {
    **_DEFAULTS,
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}
_MOE_DEFAULTS = {
    **_NEXT_DEFAULTS,
    "vocab_size": 248_320,
    "num_hidden_layers": 40,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}

_PATTERN = 4
"""Every fourth layer has attention, unless the config says otherwise."""


def _next_config(config: hf.HfConfig) -> ModelConfig:
    config = hf.with_defaults(config, _NEXT_DEFAULTS)
    return _config(config, is_grouped=True, moe=_moe(config, hf.flag(config, "norm_topk_prob")))


def _dense_config(config: hf.HfConfig) -> ModelConfig:
    config = _unnested(config)
    return _config(hf.with_defaults(config, _DENSE_DEFAULTS), is_grouped=False)


def _moe_config(config: hf.HfConfig) -> ModelConfig:
    config = _unnested(config)
    config = hf.with_defaults(config, _MOE_DEFAULTS)
    # Its class always divides the probabilities by their sum.
    return _config(config, is_grouped=False, moe=_moe(config, norm_topk_prob=True))


def _multimodal_config(config: hf.HfConfig) -> ModelConfig:
    return _dense_config(hf.text_config(config, "Qwen3_5ForCausalLM"))


def _multimodal_moe_config(config: hf.HfConfig) -> ModelConfig:
    return _moe_config(hf.text_config(config, "Qwen3_5MoeForCausalLM"))


def _unnested(config: hf.HfConfig) -> hf.HfConfig:
    """A text model's settings, which may lie under `text_config` as in a multimodal config."""
    return {**config.get("text_config", config), "architectures": config["architectures"]}


def _config(config: hf.HfConfig, *, is_grouped: bool, moe: MoEConfig | None = None) -> ModelConfig:
    hf.check_settings(
        config,
        hidden_act=hf.SILU,
        decoder_sparse_step=1,
        attn_output_gate=True,
        output_gate_type="swish",
    )
    if config.get("mlp_only_layers"):
        raise UnsupportedModelError(
            f"mlp_only_layers={config['mlp_only_layers']!r} is not supported, only []: all layers "
            "must have experts"
        )
    rope = read_rope(config, rotates_part=True)
    if moe is not None:
        # config.json's own intermediate_size is that of MLPs which no layer has.
        config = {**config, "intermediate_size": moe.intermediate_size}
    pattern = config.get("full_attention_interval", _PATTERN)
    nets = LinearAttentionConfig(
        layers=hf.linear_layers(config, pattern),
        num_key_heads=config["linear_num_key_heads"],
        num_value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        conv_size=config["linear_conv_kernel_dim"],
        is_grouped=is_grouped,
    )
    return hf.dense_config(
        config,
        rope=rope,
        tied_by_default=False,
        moe=moe,
        linear_attention=nets,
        attention_bias=hf.flag(config, "attention_bias"),
    )


def _moe(config: hf.HfConfig, norm_topk_prob: bool) -> MoEConfig:
    return MoEConfig(
        num_experts=config["num_experts"],
        num_experts_per_token=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        norm_topk_prob=norm_topk_prob,
        shared_size=config["shared_expert_intermediate_size"],
    )


_TRAITS = DecoderTraits(has_qk_norm=True, has_offset_norms=True, has_output_gate=True)

QWEN3_NEXT = decoder(_TRAITS, _next_config)
QWEN3_5 = decoder(_TRAITS, _dense_config)
QWEN3_5_MULTIMODAL = QWEN3_5._replace(config_from_hf=_multimodal_config)
QWEN3_5_MOE = decoder(_TRAITS, _moe_config)
QWEN3_5_MOE_MULTIMODAL = QWEN3_5_MOE._replace(config_from_hf=_multimodal_moe_config)
