"""Qwen2 and Qwen2.5, dense; Qwen3, dense and with experts in the place of each MLP.

Llama's decoder with biases on queries, keys and values (Qwen2 Technical Report, 2024), or with
normalised queries and keys (Qwen3 Technical Report, 2025).
"""

from __future__ import annotations

from sgljax_engine.checks import check_count
from sgljax_engine.errors import InvalidConfigError, UnsupportedModelError
from sgljax_engine.model_config import AttentionConfig, ModelConfig, MoEConfig
from sgljax_engine.models import hf
from sgljax_engine.models.decoder import decoder
from sgljax_engine.models.decoder_params import DecoderTraits
from sgljax_engine.models.hf_rope import read_rope

_DEFAULTS = {
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN3_DEFAULTS = {**_DEFAULTS, "head_dim": 128}
_MOE_DEFAULTS = {
    **_DEFAULTS,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
}
"""Settings that a config may leave out, of transformers' classes."""


def _qwen2_config(config: hf.HfConfig) -> ModelConfig:
    hf.warn_without_effect(config, "attention_bias", "mlp_bias")
    config = hf.with_defaults(config, _DEFAULTS)
    return _dense_config({**config, "attention_bias": None})


def _qwen3_config(config: hf.HfConfig) -> ModelConfig:
    hf.warn_without_effect(config, "mlp_bias")
    return _dense_config(hf.with_defaults(config, _QWEN3_DEFAULTS))


def _dense_config(config: hf.HfConfig) -> ModelConfig:
    hf.check_settings(config, hidden_act=hf.SILU, use_sliding_window=(True, False))
    return hf.dense_config(
        config,
        rope=read_rope(config),
        tied_by_default=False,
        attention=_attention(config),
        attention_bias=hf.flag(config, "attention_bias"),
    )


def _window(config: hf.HfConfig) -> int | None:
    """The window of sliding layers; None without `use_sliding_window`."""
    return config["sliding_window"] if hf.flag(config, "use_sliding_window") else None


def _attention(config: hf.HfConfig) -> AttentionConfig:
    """Windows, which count only with `use_sliding_window`: in the last layers by default."""
    window = _window(config)
    sliding: tuple[bool, ...] = ()
    if config.get("layer_types") is not None:
        sliding = hf.sliding_layers(config, 1)
    elif window is not None:
        num_layers, first = hf.require(config, "num_hidden_layers"), config["max_window_layers"]
        check_count("num_hidden_layers", num_layers)
        check_count("max_window_layers", first, low=0)
        sliding = tuple(i >= first for i in range(num_layers))
    if not any(sliding):
        return AttentionConfig()
    if window is None:
        raise InvalidConfigError(
            "layer_types has 'sliding_attention', which needs use_sliding_window=true and "
            f"sliding_window, got {config.get('use_sliding_window')!r} and "
            f"{config['sliding_window']!r}"
        )
    return AttentionConfig(sliding_window=window, sliding_layers=sliding)


def _moe_config(config: hf.HfConfig) -> ModelConfig:
    hf.warn_without_effect(config, "mlp_bias")
    config = hf.with_defaults(config, _MOE_DEFAULTS)
    hf.check_settings(
        config, hidden_act=hf.SILU, decoder_sparse_step=1, use_sliding_window=(True, False)
    )
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
        norm_topk_prob=hf.flag(config, "norm_topk_prob"),
    )
    # config.json's own intermediate_size is that of MLPs which no layer has.
    config = {**config, "intermediate_size": moe.intermediate_size}
    return hf.dense_config(
        config,
        rope=read_rope(config),
        tied_by_default=False,
        attention=hf.sliding_everywhere(config, _window(config)),
        attention_bias=hf.flag(config, "attention_bias"),
        moe=moe,
    )


QWEN2 = decoder(DecoderTraits(has_qkv_bias=True), _qwen2_config)
QWEN3 = decoder(DecoderTraits(has_qk_norm=True), _qwen3_config)
QWEN3_MOE = decoder(DecoderTraits(has_qk_norm=True), _moe_config)
