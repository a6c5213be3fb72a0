"""DeepSeek V2 and V3, and Kimi, whose class is V3's: latent attention and experts in groups.

Sources: DeepSeek-V2 (DeepSeek-AI, arXiv 2405.04434), DeepSeek-V3 (arXiv 2412.19437). Settings mean
what transformers 5.24 makes of them: before, its V2 left YaRN's `mscale_all_dim` out of scores.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sgljax_engine.checks import check_count, require
from sgljax_engine.model_config import (
    AttentionConfig,
    LatentConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
    RouterConfig,
)
from sgljax_engine.models import hf
from sgljax_engine.models.decoder import decoder
from sgljax_engine.models.decoder_params import DecoderTraits
from sgljax_engine.models.hf_rope import read_rope, yarn_scale

_LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, whatever `rms_norm_eps` is."""

_DEFAULTS: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
}
_V2_DEFAULTS: dict[str, Any] = {
    **_DEFAULTS,
    "max_position_embeddings": 2048,
    "first_k_dense_replace": 0,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
}
_V3_DEFAULTS: dict[str, Any] = {
    **_DEFAULTS,
    "num_key_value_heads": 128,
    "max_position_embeddings": 4096,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "rope_interleave": True,
}
"""Settings that a config may leave out, of transformers' classes."""


def _v2_config(config: hf.HfConfig) -> ModelConfig:
    config = hf.with_defaults(config, _V2_DEFAULTS)
    # transformers divides no probabilities by their sum; DeepSeek's code does, where this is set.
    hf.check_settings(
        config,
        topk_method=("greedy", "group_limited_greedy"),
        scoring_func="softmax",
        norm_topk_prob=False,
    )
    router = RouterConfig(scale=_scale(config))
    if hf.require(config, "topk_method") == "group_limited_greedy":
        router = dataclasses.replace(router, **_groups(config))
    return _config(config, router, norm_topk_prob=False, is_interleaved=True)


def _v3_config(config: hf.HfConfig) -> ModelConfig:
    config = hf.with_defaults(config, _V3_DEFAULTS)
    hf.warn_without_effect(config, "mlp_bias")
    config = {**config, "mlp_bias": False}
    hf.check_settings(
        config,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        head_dim=config["qk_rope_head_dim"],
    )
    router = RouterConfig(
        is_sigmoid=True,
        has_choice_bias=True,
        num_group_scores=2,
        scale=_scale(config),
        **_groups(config),
    )
    norm, pairs = hf.flag(config, "norm_topk_prob"), hf.flag(config, "rope_interleave")
    return _config(config, router, norm_topk_prob=norm, is_interleaved=pairs)


def _scale(config: hf.HfConfig) -> float:
    return hf.number("routed_scaling_factor", config["routed_scaling_factor"])


def _groups(config: hf.HfConfig) -> dict[str, int]:
    return {
        "num_groups": hf.require(config, "n_group"),
        "num_chosen_groups": hf.require(config, "topk_group"),
    }


def _config(
    config: hf.HfConfig, router: RouterConfig, *, norm_topk_prob: bool, is_interleaved: bool
) -> ModelConfig:
    hf.check_settings(config, hidden_act=hf.SILU, moe_layer_freq=1)
    hf.check_full_attention(config)
    num_heads = hf.require(config, "num_attention_heads")
    kv_heads = config.get("num_key_value_heads")
    require(
        kv_heads in (None, num_heads),
        "num_key_value_heads",
        kv_heads,
        f"num_attention_heads ({num_heads}): latents are of all heads",
    )
    latent = LatentConfig(
        rank=hf.require(config, "kv_lora_rank"),
        query_rank=config["q_lora_rank"],
        nope_dim=hf.require(config, "qk_nope_head_dim"),
        rope_dim=hf.require(config, "qk_rope_head_dim"),
        value_dim=hf.require(config, "v_head_dim"),
        norm_eps=_LATENT_EPS,
        is_interleaved=is_interleaved,
    )
    sizes = {"num_key_value_heads": 1, "head_dim": latent.page_dim}
    rope = read_rope({**config, "head_dim": latent.rope_dim})
    return hf.dense_config(
        {**config, **sizes},
        rope=rope,
        tied_by_default=False,
        attention=AttentionConfig(scale=_softmax_scale(config, rope, latent), latent=latent),
        attention_bias=hf.flag(config, "attention_bias"),
        mlp_bias=hf.flag(config, "mlp_bias"),
        moe=_moe(config, router, norm_topk_prob),
    )


def _softmax_scale(config: hf.HfConfig, rope: RopeConfig, latent: LatentConfig) -> float:
    """YaRN lengthens queries and keys by a factor of `mscale_all_dim` each."""
    scale = latent.query_dim**-0.5
    settings = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if rope.yarn is None or not settings.get("mscale_all_dim"):
        return scale
    mscale = hf.number("mscale_all_dim", settings["mscale_all_dim"])
    return scale * yarn_scale(rope.yarn.factor, mscale) ** 2


def _moe(config: hf.HfConfig, router: RouterConfig, norm_topk_prob: bool) -> MoEConfig | None:
    num_dense, num_layers = config["first_k_dense_replace"], hf.require(config, "num_hidden_layers")
    num_shared, width = config["n_shared_experts"], hf.require(config, "moe_intermediate_size")
    check_count("first_k_dense_replace", num_dense, low=0)
    check_count("num_hidden_layers", num_layers)
    check_count("n_shared_experts", num_shared, low=0)
    check_count("moe_intermediate_size", width)
    if num_dense >= num_layers:
        return None
    return MoEConfig(
        num_experts=hf.require(config, "n_routed_experts"),
        num_experts_per_token=hf.require(config, "num_experts_per_tok"),
        intermediate_size=width,
        norm_topk_prob=norm_topk_prob,
        shared_size=num_shared * width,
        has_shared_gate=False,
        num_dense_layers=num_dense,
        router=router,
    )


V2 = decoder(DecoderTraits(), _v2_config)
V3 = decoder(DecoderTraits(), _v3_config)
