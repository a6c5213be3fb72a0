"""The golden models with attention over latents: DeepSeek V2 and V3. Made by transformers 5.24."""

# The development environment has no torch.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from golden_specs import GoldenSpec

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
_SIZES: dict[str, Any] = {
    "vocab_size": 112,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 8,
    "tied": False,
    "rope_theta": 10_000.0,
    "rope": _YARN,
}
_SETTINGS: dict[str, Any] = {
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "n_group": 4,
    "topk_group": 2,
}
_WRONG_SETTINGS: tuple[tuple[str, Any], ...] = (
    ("rope_parameters", _YARN | {"mscale_all_dim": None}),
    ("rope_parameters", _YARN | {"mscale_all_dim": 1.0}),
    ("rope_parameters", _YARN | {"factor": 4.0}),
    ("routed_scaling_factor", 1.0),
    ("num_experts_per_tok", 2),
    ("topk_group", 4),
)
_WRONG_WEIGHTS = (
    *("kv_a_layernorm.weight", "kv_b_proj.weight", "kv_a_proj_with_mqa.weight"),
    *("mlp.gate.weight", "shared_experts.down_proj.weight", "mlp.down_proj.weight"),
)

LATENT_SPECS = (
    GoldenSpec(
        name="groups",
        family="deepseek_v2",
        **_SIZES,
        settings={**_SETTINGS, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
        wrong_settings=(*_WRONG_SETTINGS, ("topk_method", "greedy")),
        wrong_weights=_WRONG_WEIGHTS,
    ),
    GoldenSpec(
        name="groups",
        family="deepseek_v3",
        **_SIZES,
        settings={**_SETTINGS, "q_lora_rank": 20, "attention_bias": True},
        wrong_settings=(*_WRONG_SETTINGS, ("norm_topk_prob", False), ("rope_interleave", False)),
        wrong_weights=(
            *_WRONG_WEIGHTS,
            *("q_a_layernorm.weight", "q_a_proj.bias", "kv_a_proj_with_mqa.bias", "o_proj.bias"),
            "e_score_correction_bias",
        ),
    ),
)
