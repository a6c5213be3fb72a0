"""MaxText's config as the engine's ModelConfig.

It follows what the code of MaxText 0.2.5 computes. What the engine cannot compute is refused by the
name of the config's field.
"""

from __future__ import annotations

import math
from typing import Any

from sgljax_engine import (
    AttentionConfig,
    KVShape,
    LatentConfig,
    LinearAttentionConfig,
    Llama3Scaling,
    ModelConfig,
    MoEConfig,
    RopeConfig,
    RouterConfig,
    ScaleConfig,
    UnsupportedModelError,
    YarnScaling,
)
from tunix_sgljax.maxtext.fields import HYBRIDS, check_fields, get, require
from tunix_sgljax.maxtext.layers import cycle_length, net_layers, num_layers, sliding_layers

_SILU, _GELU, _SIGMOID = (["silu", "linear"], ["gelu", "linear"], ["sigmoid", "linear"])

_SCALES_QUERIES = ("gpt_oss", "olmo3")
"""Decoder blocks with windows and the scale of attention in the graph, not in the weights."""

_OLMO3_NAMES = ("olmo3-7b", "olmo3-7b-pt", "olmo3-32b")

_ARCHITECTURES = {
    "deepseek": "DeepseekV2ForCausalLM",
    "llama2": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    # MaxText has one layer for both: of Qwen3.5 too, the nets' projections are grouped.
    **dict.fromkeys(HYBRIDS, "Qwen3NextForCausalLM"),
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "gemma4_small": "Gemma4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
}
"""The engine's architectures by MaxText's decoder blocks."""

_DEEPSEEK = "deepseek"

_MLP_SIZED = ("mixtral", "gpt_oss")
"""Decoder blocks whose experts are as wide as `mlp_dim`, whatever `moe_mlp_dim` says."""

_LLAMA3_SCALING = Llama3Scaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=8192
)
"""Constants in MaxText's LLaMARotaryEmbedding."""


def to_model_config(config: Any, context_length: int) -> ModelConfig:
    """The engine's description of a model that MaxText trains."""
    require(config, "decoder_block", _ARCHITECTURES)
    block = get(config, "decoder_block")
    check_fields(config)
    _check_block(config, block)
    moe, kv_layers = _moe(config, block), _kv_layers(config, block)
    is_wide = bool(kv_layers) and get(config, "use_double_wide_mlp")
    size = _mlp_size(config, moe)
    is_tied = get(config, "logits_via_embedding")
    rope, attention = _rope(config, block, slides=False), _attention(config, block, kv_layers)
    latent = attention.latent
    if rope.yarn is not None:  # MaxText has a table of so many positions
        context_length = min(context_length, get(config, "max_position_embeddings"))
    return ModelConfig(
        architecture=_ARCHITECTURES[block],
        vocab_size=get(config, "vocab_size"),
        hidden_size=get(config, "emb_dim"),
        intermediate_size=size,
        num_layers=num_layers(config),
        num_heads=get(config, "num_query_heads"),
        num_kv_heads=get(config, "num_kv_heads") if latent is None else 1,
        head_dim=get(config, "head_dim") if latent is None else latent.page_dim,
        rope=rope,
        rms_norm_eps=get(config, "normalization_layer_epsilon"),
        tie_word_embeddings=is_tied and not rounds_head(config),
        context_length=context_length,
        attention=attention,
        final_logit_softcap=(get(config, "final_logits_soft_cap") or None) if is_tied else None,
        per_layer_input_size=(
            get(config, "hidden_size_per_layer_input") if block == "gemma4_small" else 0
        ),
        shared_kv_intermediate_size=2 * size if is_wide else None,
        attention_bias=block in _SCALES_QUERIES and get(config, "attention_bias"),
        moe=moe,
        scales=_scales(config, is_gemma=block.startswith("gemma")),
        linear_attention=_nets(config) if block in HYBRIDS else None,
    )


def latents(config: Any) -> LatentConfig | None:
    """What the keys and values of DeepSeek's layers are made of; None for other models."""
    if get(config, "decoder_block") != _DEEPSEEK:
        return None
    return LatentConfig(
        rank=get(config, "kv_lora_rank"),
        query_rank=None,
        nope_dim=get(config, "qk_nope_head_dim"),
        rope_dim=get(config, "qk_rope_head_dim"),
        value_dim=get(config, "v_head_dim"),
        norm_eps=get(config, "normalization_layer_epsilon"),
        is_interleaved=True,
    )


def compute_dtype(config: Any) -> str:
    """Name of the dtype in which MaxText computes; `weight_dtype` only stores."""
    return get(config, "dtype")


def rounds_head(config: Any) -> bool:
    """Whether a tied head has other values than the embeddings: MaxText rounds it to bfloat16."""
    dtypes = (get(config, "dtype"), get(config, "weight_dtype"))
    return get(config, "logits_via_embedding") and "bfloat16" not in dtypes


def is_interleaved(config: Any) -> bool:
    """Whether the rotary embedding turns neighbouring channels, not those of two halves."""
    name, kind = get(config, "model_name"), get(config, "rope_type")
    return name.startswith("llama3.1") or kind.startswith("llama3.1")


def _check_block(config: Any, block: str) -> None:
    reason, is_gemma = f" with decoder_block={block!r}", block.startswith("gemma")
    is_gpt_oss = block == "gpt_oss"
    activations = _GELU if is_gemma else _SIGMOID if is_gpt_oss else _SILU
    require(config, "mlp_activations", [activations], reason)
    for name in ("attention_sink", "mlp_bias"):
        require(config, name, (is_gpt_oss,), reason)
    is_deepseek = block == _DEEPSEEK
    require(config, "attention_type", ("mla" if is_deepseek else "global",), reason)
    if is_deepseek:
        _check_deepseek(config, reason)
    if block == "qwen2":
        require(config, "attention_bias", (True,), reason)
    if block in HYBRIDS:
        _check_hybrid(config, block, reason)
    else:
        cycle = cycle_length(config) if block in _SCALES_QUERIES else 1
        require(config, "inhomogeneous_layer_cycle_interval", (cycle,), reason)
        require(config, "use_mrope", (False,), reason)
    if block in ("qwen3_5", *_SCALES_QUERIES):
        _check_whole_cycles(config, reason)
    if block == "olmo3":
        # MaxText norms queries and keys over all heads by the model's name.
        require(config, "model_name", _OLMO3_NAMES, reason)
        require(config, "use_qk_norm", (True,), reason)
    if block in ("qwen2", "qwen3", "qwen3_moe"):
        require(config, "use_qk_norm", (block != "qwen2",), reason)
    if is_gemma:
        # MaxText gives its config's epsilon to some norms of these layers alone.
        require(config, "normalization_layer_epsilon", (1e-6,), reason)
    if block in ("gemma2", "gemma3", "gemma4"):
        require(config, "use_post_attn_norm", (True,), reason)
        require(config, "use_post_ffw_norm", (True,), reason)
    if block.startswith("gemma4"):
        require(config, "v_norm_with_scale", (False,), reason)
    if block == "gemma4_small":
        require(config, "share_kv_projections", (False,), reason)
        if get(config, "hidden_size_per_layer_input"):
            vocab_size = get(config, "vocab_size")
            require(config, "vocab_size_per_layer_input", (vocab_size,), reason)


def _check_hybrid(config: Any, block: str, reason: str) -> None:
    # True gives attention other norms of queries and keys than those with 1 + w.
    require(config, "use_qk_norm", (False,), reason)
    require(config, "use_qk_norm_in_gdn", (True,), reason)
    cycle, count = get(config, "inhomogeneous_layer_cycle_interval"), num_layers(config)
    if not 2 <= cycle <= count:
        raise UnsupportedModelError(
            f"MaxText's inhomogeneous_layer_cycle_interval={cycle!r} is not supported{reason}, "
            f"only 2 to num_decoder_layers ({count}): some layers must be nets, and some not"
        )


def _check_deepseek(config: Any, reason: str) -> None:
    for name, supported in {
        "model_name": ("deepseek2-16b",),  # MaxText routes the others in other ways
        "engram_layers": ([], ()),
        "experimental_sa_quant_q_fp8": (False,),
        "num_kv_heads": (get(config, "num_query_heads"),),
        "q_lora_rank": (0,),
        "rope_type": ("yarn",),
        "use_indexer": (False,),
    }.items():
        require(config, name, supported, reason)
    num_dense, count = get(config, "first_num_dense_layers"), num_layers(config)
    if not 0 <= num_dense < count:
        raise UnsupportedModelError(
            f"MaxText's first_num_dense_layers={num_dense} is not supported{reason}, only 0 to "
            f"num_decoder_layers - 1 ({count - 1})"
        )


def _check_whole_cycles(config: Any, reason: str) -> None:
    cycle, count = get(config, "inhomogeneous_layer_cycle_interval"), num_layers(config)
    if get(config, "scan_layers") and count % cycle:
        raise UnsupportedModelError(
            f"MaxText's num_decoder_layers={count} is not supported with scan_layers=True{reason}, "
            f"only multiples of inhomogeneous_layer_cycle_interval ({cycle}): MaxText leaves out "
            "the others"
        )


def _nets(config: Any) -> LinearAttentionConfig:
    return LinearAttentionConfig(
        layers=net_layers(config),
        num_key_heads=get(config, "gdn_num_key_heads"),
        num_value_heads=get(config, "gdn_num_value_heads"),
        key_dim=get(config, "gdn_key_head_dim"),
        value_dim=get(config, "gdn_value_head_dim"),
        conv_size=get(config, "gdn_conv_kernel_dim"),
        is_grouped=True,
    )


def _mlp_size(config: Any, moe: MoEConfig | None) -> int:
    """`ModelConfig.intermediate_size`: of shared experts, where there are some, their sum."""
    if moe is None or moe.num_dense_layers:
        return get(config, "mlp_dim")
    if not moe.is_beside_mlp:
        return moe.intermediate_size
    return get(config, "shared_experts") * get(config, "mlp_dim")


def _moe(config: Any, block: str) -> MoEConfig | None:
    is_beside_mlp = block == "gemma4" and get(config, "num_experts") > 1
    is_gpt_oss, is_deepseek = block == "gpt_oss", block == _DEEPSEEK
    has_experts = block in ("qwen3_moe", "mixtral", "gpt_oss", _DEEPSEEK, *HYBRIDS)
    if not has_experts and not is_beside_mlp:
        return None
    for name, supported in {
        "moe_expert_input_dim": (-1, 0, get(config, "emb_dim")),
        "n_routing_groups": (-1,),
        "padded_base_moe_mlp_dim": (None,),
        "prefuse_moe_weights": (False,),
        "routed_bias": (is_gpt_oss,),
        "routed_score_func": ("softmax" if is_deepseek else "",),
        "use_random_routing": (False,),
    }.items():
        require(config, name, supported, " with experts")
    if get(config, "capacity_factor") > 0:
        raise UnsupportedModelError(
            f"MaxText's capacity_factor={get(config, 'capacity_factor')!r} is not supported: it "
            "drops tokens of full experts; only -1.0, which drops none"
        )
    limit = get(config, "mlp_activations_limit") if is_gpt_oss else None
    if limit is not None and limit <= 0:
        raise UnsupportedModelError(
            f"MaxText's mlp_activations_limit={limit!r} is not supported with "
            f"decoder_block={block!r}, only numbers above 0: MaxText clips by it"
        )
    # One shared expert, as wide as the others whatever the number; DeepSeek's are side by side.
    num_shared = get(config, "shared_experts") if block in (_DEEPSEEK, *HYBRIDS) else 0
    num_shared = num_shared if is_deepseek else min(num_shared, 1)
    return MoEConfig(
        num_experts=get(config, "num_experts"),
        num_experts_per_token=get(config, "num_experts_per_tok"),
        intermediate_size=get(config, "mlp_dim" if block in _MLP_SIZED else "moe_mlp_dim"),
        # Elsewhere than in these MaxText takes the softmax over the chosen experts alone.
        norm_topk_prob=get(config, "norm_topk_prob") if is_beside_mlp else not is_deepseek,
        is_beside_mlp=is_beside_mlp,
        shared_size=num_shared * get(config, "moe_mlp_dim") if num_shared else 0,
        has_shared_gate=not is_deepseek,
        num_dense_layers=get(config, "first_num_dense_layers") if is_deepseek else 0,
        router=RouterConfig(scale=get(config, "routed_scaling_factor") if is_deepseek else 1.0),
        has_bias=is_gpt_oss,
        swiglu_limit=limit,
    )


def _attention(config: Any, block: str, kv_layers: tuple[int, ...]) -> AttentionConfig:
    if block.startswith("qwen"):
        return AttentionConfig()
    latent = latents(config)
    if latent is not None:
        scale = _deepseek_scale(config, latent.query_dim)
        return AttentionConfig(scale=scale, latent=latent)
    sliding = sliding_layers(config)
    is_gemma4 = block.startswith("gemma4")
    # MaxText gives the cap to no other block's attention.
    is_capped = block == "llama2" or block.startswith("gemma")
    scale = None if block in _SCALES_QUERIES else 1.0
    return AttentionConfig(
        scale=_gemma3_scale(config) if block == "gemma3" else scale,
        logit_softcap=(get(config, "attn_logits_soft_cap") or None) if is_capped else None,
        sliding_window=get(config, "sliding_window_size") if any(sliding) else None,
        sliding_layers=sliding,
        sliding_rope=_rope(config, block, slides=True) if any(sliding) else None,
        full_kv=_gemma4_full_kv(config) if is_gemma4 else None,
        full_values_are_keys=is_gemma4 and get(config, "share_kv_projections"),
        kv_layers=kv_layers,
    )


def _deepseek_scale(config: Any, query_dim: int) -> float:
    scale = query_dim**-0.5
    lengths = ("max_position_embeddings", "original_max_position_embeddings")
    longest, original = (get(config, name) for name in lengths)
    if longest <= original:
        return scale
    return scale * (0.1 * get(config, "mscale") * math.log(get(config, "rope_factor")) + 1.0) ** 2


def _gemma3_scale(config: Any) -> float:
    """What MaxText multiplies queries by, from its model's name."""
    name = get(config, "model_name")
    if name == "gemma3-27b":
        return (get(config, "base_emb_dim") // get(config, "base_num_query_heads")) ** -0.5
    require(config, "model_name", ("gemma3-4b", "gemma3-12b", "gemma3-27b"), " of a Gemma 3")
    return get(config, "head_dim") ** -0.5


def _gemma4_full_kv(config: Any) -> KVShape:
    return KVShape(
        get(config, "global_num_kv_heads") or get(config, "num_kv_heads"),
        get(config, "global_head_dim") or get(config, "head_dim"),
    )


def _kv_layers(config: Any, block: str) -> tuple[int, ...]:
    """`AttentionConfig.kv_layers`; the small Gemma 4 models share keys among their last layers."""
    num_shared = get(config, "num_kv_shared_layers") if block == "gemma4_small" else 0
    if num_shared == 0:
        return ()
    sliding = sliding_layers(config)
    num_owners = max(0, len(sliding) - num_shared)
    donors = {sliding[layer]: layer for layer in range(num_owners)}
    if len(donors) < len(set(sliding)):
        raise UnsupportedModelError(
            f"MaxText's num_kv_shared_layers={num_shared} leaves a kind of layers without one that "
            f"has keys; the model has {len(sliding)} layers"
        )
    return tuple(
        layer if layer < num_owners else donors[slides] for layer, slides in enumerate(sliding)
    )


def _rope(config: Any, block: str, *, slides: bool) -> RopeConfig:
    theta, factor = get(config, "rope_max_timescale"), get(config, "rope_linear_scaling_factor")
    if is_interleaved(config):
        if block != "llama2":
            raise UnsupportedModelError(
                f"MaxText's rope_type={get(config, 'rope_type')!r} is not supported with "
                f"decoder_block={block!r}, only with 'llama2'"
            )
        scaling = _LLAMA3_SCALING if get(config, "rope_use_scale") else None
        return RopeConfig(theta=float(theta), llama3=scaling)
    is_yarn = get(config, "rope_type") == "yarn"
    if is_yarn and block not in HYBRIDS and not block.startswith("gemma"):
        return _yarn(config, block)
    require(config, "rope_type", ("default", "llama3.1"))
    if block in HYBRIDS:
        head_dim = get(config, "head_dim")
        rotary_dim = int(head_dim * get(config, "partial_rotary_factor"))
        return RopeConfig(
            theta=float(theta), rotary_dim=None if rotary_dim == head_dim else rotary_dim
        )
    local = get(config, "local_rope_max_timescale")
    if slides and local > 0:
        theta = local
    if block.startswith("gemma4"):
        return _gemma4_rope(config, theta, factor, slides=slides)
    if slides and get(config, "model_name").startswith("gemma3"):
        factor = 1.0
    return RopeConfig(theta=float(theta), linear_factor=float(factor))


def _yarn(config: Any, block: str) -> RopeConfig:
    """The same in all layers, also where a base for sliding ones is set."""
    reason = f" with rope_type='yarn' and decoder_block={block!r}"
    require(config, "rope_interleave", (block == _DEEPSEEK,), reason)
    factor = get(config, "rope_factor")
    is_scaled = get(config, "rope_attention_scaling") and factor > 1
    return RopeConfig(
        theta=float(get(config, "rope_max_timescale")),
        yarn=YarnScaling(
            factor=float(factor),
            beta_fast=float(get(config, "beta_fast")),
            beta_slow=float(get(config, "beta_slow")),
            original_context_length=get(config, "original_max_position_embeddings"),
            truncate=get(config, "rope_truncate"),
        ),
        attention_factor=0.1 * math.log(factor) + 1.0 if is_scaled else 1.0,
    )


def _gemma4_rope(config: Any, theta: float, factor: float, *, slides: bool) -> RopeConfig:
    fraction = get(config, "local_rope_proportion" if slides else "global_rope_proportion")
    if not slides and get(config, "global_rope_max_timescale") > 0:
        theta = get(config, "global_rope_max_timescale")
    if fraction >= 1.0:
        return RopeConfig(theta=float(theta), linear_factor=float(factor))
    return RopeConfig(theta=float(theta), rotary_fraction=float(fraction))


def _scales(config: Any, *, is_gemma: bool) -> ScaleConfig:
    """MaxText's Gemma keeps the factor of embeddings and the offset of norms in its weights."""
    is_divided = get(config, "logits_via_embedding") and get(config, "normalize_embedding_logits")
    logits = get(config, "emb_dim") ** -0.5 if is_divided else 1.0
    if not is_gemma:
        return ScaleConfig(logits=logits)
    return ScaleConfig(embedding=1.0, norm_offset=0.0, logits=logits)
