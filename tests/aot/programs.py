"""Shapes to compile for devices that are not here."""

from __future__ import annotations

import dataclasses

from sgljax_engine import ModelConfig, MoEConfig, RopeConfig
from sgljax_engine.model_config import AttentionConfig, LatentConfig

QWEN3_8B = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope=RopeConfig(theta=1e6),
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    context_length=40960,
)

TWO_LAYERS = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=32000,
    hidden_size=512,
    intermediate_size=1024,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=128,
    rope=RopeConfig(theta=1e6),
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    context_length=1024,
)

GPT_OSS = dataclasses.replace(
    TWO_LAYERS,
    architecture="GptOssForCausalLM",
    hidden_size=2880,
    intermediate_size=2880,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    tie_word_embeddings=False,
    attention_bias=True,
    attention=AttentionConfig(sliding_window=128, sliding_layers=(True, False)),
    moe=MoEConfig(
        num_experts=32,
        num_experts_per_token=4,
        intermediate_size=2880,
        norm_topk_prob=True,
        has_bias=True,
        swiglu_limit=7.0,
    ),
)
"""Two layers of gpt-oss-20b, of which one slides, with a smaller vocabulary."""

LATENTS = ModelConfig(
    architecture="DeepseekV2ForCausalLM",
    vocab_size=8192,
    hidden_size=2048,
    intermediate_size=10_944,
    num_layers=3,
    num_heads=16,
    num_kv_heads=1,
    head_dim=576,
    rope=RopeConfig(theta=10_000.0),
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    context_length=4096,
    attention=AttentionConfig(
        scale=192**-0.5,
        latent=LatentConfig(
            rank=512,
            query_rank=None,
            nope_dim=128,
            rope_dim=64,
            value_dim=128,
            norm_eps=1e-6,
            is_interleaved=True,
        ),
    ),
    moe=MoEConfig(
        num_experts=64,
        num_experts_per_token=6,
        intermediate_size=1408,
        norm_topk_prob=False,
        shared_size=2816,
        has_shared_gate=False,
        num_dense_layers=1,
    ),
)
"""Three layers of DeepSeek V2 Lite, of which the first is dense, with a smaller vocabulary."""
