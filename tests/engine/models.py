"""Small models for the engine's tests."""

from __future__ import annotations

import dataclasses

import numpy as np

from sgljax_engine import (
    LatentConfig,
    LinearAttentionConfig,
    LoraRule,
    ModelConfig,
    MoEConfig,
    RopeConfig,
    RouterConfig,
    SamplingParams,
    WeightRule,
    logical_rules,
)
from sgljax_engine.model_config import AttentionConfig, KVShape
from sgljax_engine.models.latent import K_UP, KV_UP, V_UP
from sgljax_engine.models.registry import get_model
from sgljax_engine.models.spec import ParamKind
from sgljax_engine.models.weight_rules import expert_name
from sgljax_engine.types import Request

TINY = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope=RopeConfig(theta=1e6),
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    context_length=256,
)

_GEMMA4 = dataclasses.replace(
    TINY,
    architecture="Gemma4ForCausalLM",
    final_logit_softcap=16.0,
)
MIXED_HEADS = dataclasses.replace(
    _GEMMA4,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    attention=AttentionConfig(
        scale=0.125,
        sliding_window=13,
        sliding_layers=(True, False, True),
        sliding_rope=RopeConfig(theta=1e4),
        full_kv=KVShape(2, 32),
        full_values_are_keys=True,
    ),
)
"""As Gemma 4 31B: layers with full attention have fewer, wider kv heads, whose keys are values."""

SHARED_KEYS = dataclasses.replace(
    _GEMMA4,
    num_layers=4,
    num_kv_heads=1,
    per_layer_input_size=8,
    shared_kv_intermediate_size=96,
    attention=AttentionConfig(
        scale=0.125,
        sliding_window=13,
        sliding_layers=(True, False, True, False),
        sliding_rope=RopeConfig(theta=1e4),
        full_kv=KVShape(1, 32),
        kv_layers=(0, 1, 0, 1),
    ),
)
"""As Gemma 4 E2B: one kv head, the last layers read keys of the first, inputs for each layer."""


TINY_MOE = dataclasses.replace(
    TINY,
    architecture="Qwen3MoeForCausalLM",
    intermediate_size=24,
    moe=MoEConfig(
        num_experts=8, num_experts_per_token=3, intermediate_size=24, norm_topk_prob=True
    ),
)


GPT_OSS = dataclasses.replace(
    TINY_MOE,
    architecture="GptOssForCausalLM",
    attention_bias=True,
    attention=AttentionConfig(sliding_window=13, sliding_layers=(True, False)),
    moe=MoEConfig(
        num_experts=8,
        num_experts_per_token=3,
        intermediate_size=24,
        norm_topk_prob=True,
        has_bias=True,
        swiglu_limit=7.0,
    ),
)
"""Sinks, windows in every other layer, experts with biases."""

MIXTRAL = dataclasses.replace(
    TINY_MOE,
    architecture="MixtralForCausalLM",
    moe=MoEConfig(
        num_experts=4, num_experts_per_token=2, intermediate_size=24, norm_topk_prob=True
    ),
)

OLMO3 = dataclasses.replace(
    TINY,
    architecture="Olmo3ForCausalLM",
    attention=AttentionConfig(
        sliding_window=13, sliding_layers=(True, False), sliding_rope=RopeConfig(theta=5e5)
    ),
)
"""Norms behind attention and MLP alone, of q and k over all heads, and windows."""

SMOLLM3 = dataclasses.replace(
    TINY,
    architecture="SmolLM3ForCausalLM",
    tie_word_embeddings=True,
    attention=AttentionConfig(rope_layers=(True, False)),
)
"""A layer without positions."""

NEW_FAMILIES = {"mixtral": MIXTRAL, "olmo": OLMO3, "smollm": SMOLLM3}
"""Small models of families that share a file with others, or most of their code."""


LATENTS = dataclasses.replace(
    TINY,
    architecture="DeepseekV3ForCausalLM",
    num_kv_heads=1,
    head_dim=32,
    attention_bias=True,
    attention=AttentionConfig(
        scale=0.2,
        latent=LatentConfig(
            rank=24,
            query_rank=20,
            nope_dim=12,
            rope_dim=8,
            value_dim=16,
            norm_eps=1e-6,
            is_interleaved=True,
        ),
    ),
    moe=MoEConfig(
        num_experts=8,
        num_experts_per_token=3,
        intermediate_size=24,
        norm_topk_prob=True,
        shared_size=24,
        has_shared_gate=False,
        num_dense_layers=1,
        router=RouterConfig(
            is_sigmoid=True,
            has_choice_bias=True,
            num_groups=4,
            num_chosen_groups=2,
            num_group_scores=2,
            scale=1.5,
        ),
    ),
)
"""As DeepSeek V3: pages of latents, a dense layer, then experts in groups."""


HYBRID = dataclasses.replace(
    TINY,
    architecture="Qwen3_5ForCausalLM",
    num_layers=3,
    rope=RopeConfig(theta=1e6, rotary_dim=8),
    # The norm of a net's small output would amplify rounding errors.
    rms_norm_eps=1e-2,
    linear_attention=LinearAttentionConfig(
        layers=(True, False, True),
        num_key_heads=2,
        num_value_heads=6,
        key_dim=16,
        value_dim=8,
        conv_size=4,
        is_grouped=False,
    ),
)
"""As Qwen3.5: two layers in three have a recurrent state."""


def spread_weights(model: ModelConfig = TINY, seed: int = 0) -> dict[str, np.ndarray]:
    """`logical_weights` as Hugging Face has them: projections are [out, in], experts alone."""
    specs = get_model(model.architecture).param_specs(model)
    weights, logical = {}, logical_weights(model, seed)
    for name, w in logical.items():
        if V_UP in name:  # beside the keys' in files
            continue
        if specs[name].kind is ParamKind.EXPERTS:
            weights |= {expert_name(name, i): np.ascontiguousarray(e.T) for i, e in enumerate(w)}
        elif specs[name].kind is ParamKind.HEADS:
            values = logical[name.replace(K_UP, V_UP)].swapaxes(1, 2)
            both = np.concatenate([w, values], axis=1)
            weights[name.replace(K_UP, KV_UP)] = both.reshape(-1, both.shape[2])
        else:
            weights[name] = np.ascontiguousarray(w.T) if specs[name].kind.is_projection else w
    return weights


def logical_weights(model: ModelConfig = TINY, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights large enough that logits are well spread, so greedy choices are not close.

    In the shapes that models compute with, so they go with `logical_rules`.
    """
    rng = np.random.default_rng(seed)
    weights = {}
    for name, spec in get_model(model.architecture).param_specs(model).items():
        is_factor = "norm" in name or "scalar" in name
        centre, noise = (1.0, 0.1) if is_factor else (0.0, 0.4)
        weights[name] = (centre + noise * rng.standard_normal(spec.shape)).astype(np.float32)
    return weights


def output_adapter(
    seed: int, model: ModelConfig = TINY
) -> tuple[dict[str, np.ndarray], tuple[WeightRule | LoraRule, ...]]:
    """Pairs of rank 4 for one projection, which change what is generated, and their rules."""
    rng, name = np.random.default_rng(seed), "model.layers.0.self_attn.o_proj"
    width = model.num_heads * model.head_dim
    arrays = {
        f"{name}.a": rng.normal(0, 0.5, (width, 4)).astype(np.float32),
        f"{name}.b": rng.normal(0, 0.5, (4, model.hidden_size)).astype(np.float32),
    }
    rule = LoraRule(f"{name}.weight", f"{name}.a", f"{name}.b", 1.0)
    return arrays, (*logical_rules(model), rule)


class ForeignTensor:
    """What another framework's array looks like from here."""

    shape, dtype = (32,), "torch.float32"

    def __dlpack__(self) -> object:
        raise NotImplementedError


def with_eos(model: ModelConfig, *ids: int) -> ModelConfig:
    """The same model with end-of-sequence ids."""
    return dataclasses.replace(model, eos_token_ids=ids)


def random_prompts(count: int, low: int, high: int, seed: int = 0) -> list[list[int]]:
    """Prompts of random lengths in [low, high] over TINY's vocabulary."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(low, high + 1, count)
    return [rng.integers(0, TINY.vocab_size, length).tolist() for length in lengths]


def make_requests(*lengths: int) -> list[Request]:
    """Requests "0", "1", ... with prompts of so many tokens."""
    return [
        Request(
            rid=str(i), prompt_ids=[i] * length, params=SamplingParams(max_new_tokens=128), seed=i
        )
        for i, length in enumerate(lengths)
    ]
