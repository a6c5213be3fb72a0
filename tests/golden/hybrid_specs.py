"""The golden models with gated delta nets: Qwen3-Next and Qwen3.5."""

# The development environment has no torch.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from golden_specs import GoldenSpec

_LINEAR, _FULL = "linear_attention", "full_attention"


def _rope(fraction: float = 0.25, **more: Any) -> dict[str, Any]:
    """Rotary embedding of the first part of each head."""
    return {
        "rope_type": "default",
        "rope_theta": 100_000.0,
        "partial_rotary_factor": fraction,
        **more,
    }


_MROPE = _rope(mrope_interleaved=True, mrope_section=[1, 1, 0])


def _nets(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, kernel: int = 4
) -> dict[str, Any]:
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
        "linear_conv_kernel_dim": kernel,
    }


def _experts(count: int, per_token: int, width: int, shared: int, **more: Any) -> dict[str, Any]:
    return {
        "num_experts": count,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": shared,
        **more,
    }


_OF_NETS = ("conv1d.weight", "A_log", "dt_bias", "linear_attn.out_proj.weight")
_OF_EXPERTS = ("mlp.gate.weight", "shared_expert_gate.weight", "shared_expert.down_proj.weight")
_WRONG_ROPE = ("rope_parameters", _rope(0.5))


def _spec(
    name: str,
    family: str,
    *,
    heads: tuple[int, int] = (4, 2),
    tied: bool = False,
    rope: dict[str, Any] | None = None,
    **more: Any,
) -> GoldenSpec:
    num_heads, num_kv_heads = heads
    shape: dict[str, Any] = {
        "vocab_size": 112,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_layers": 4,
        "head_dim": 16,
        "rope_theta": 100_000.0,
        # The norm of a net's small output would amplify rounding errors.
        "rms_norm_eps": 1e-2,
    }
    return GoldenSpec(
        name=name,
        family=family,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        tied=tied,
        rope=rope or _rope(),
        **shape | more,
    )


HYBRID_SPECS = (
    _spec(
        "grouped",
        "qwen3_next",
        settings={**_nets(2, 6, 8, 12), **_experts(6, 2, 20, 12, norm_topk_prob=True)},
        wrong_settings=(_WRONG_ROPE, ("num_experts_per_tok", 1), ("norm_topk_prob", False)),
        wrong_weights=(*_OF_NETS, *_OF_EXPERTS),
    ),
    # Equal heads, no fourth layer, and probabilities that are not divided by their sum.
    _spec(
        "tied",
        "qwen3_next",
        tied=True,
        heads=(6, 1),
        num_layers=3,
        settings={
            **_nets(3, 3, 16, 8),
            **_experts(5, 3, 12, 20, norm_topk_prob=False),
            "layer_types": [_LINEAR, _FULL, _LINEAR],
        },
        wrong_settings=(("norm_topk_prob", True),),
        wrong_weights=_OF_NETS,
    ),
    # One key head for five value heads, and a convolution of three tokens.
    _spec(
        "one_key_head",
        "qwen3_next",
        rms_norm_eps=1e-6,
        num_layers=2,
        settings={
            **_nets(1, 5, 12, 8, kernel=3),
            **_experts(4, 2, 16, 16, norm_topk_prob=True),
            "layer_types": [_LINEAR, _FULL],
        },
        wrong_weights=_OF_NETS,
    ),
    _spec(
        "ratio_two",
        "qwen3_5",
        rope=_MROPE,
        settings=_nets(2, 4, 16, 8),
        wrong_settings=(_WRONG_ROPE,),
        wrong_weights=(*_OF_NETS, "in_proj_a.weight", "in_proj_b.weight"),
    ),
    _spec(
        "ratio_three_tied",
        "qwen3_5",
        tied=True,
        heads=(3, 3),
        rope=_rope(0.5),
        num_layers=3,
        settings={**_nets(3, 9, 8, 4), "layer_types": [_LINEAR, _LINEAR, _FULL]},
        wrong_settings=(("rope_parameters", _rope()),),
        wrong_weights=_OF_NETS,
    ),
    _spec(
        "equal_heads",
        "qwen3_5",
        heads=(4, 1),
        num_layers=2,
        settings={**_nets(4, 4, 12, 20), "layer_types": [_FULL, _LINEAR]},
        wrong_weights=_OF_NETS,
    ),
    _spec(
        "ratio_two",
        "qwen3_5_moe",
        rope=_MROPE,
        settings={**_nets(2, 4, 8, 16), **_experts(8, 2, 16, 24)},
        wrong_settings=(("num_experts_per_tok", 1),),
        wrong_weights=(*_OF_NETS, *_OF_EXPERTS),
    ),
    _spec(
        "tied",
        "qwen3_5_moe",
        tied=True,
        heads=(6, 2),
        num_layers=2,
        settings={
            **_nets(1, 3, 16, 16),
            **_experts(5, 3, 12, 8),
            "layer_types": [_LINEAR, _FULL],
        },
        wrong_weights=_OF_NETS,
    ),
    _spec(
        "equal_heads",
        "qwen3_5_moe",
        num_layers=3,
        settings={
            **_nets(3, 3, 20, 12),
            **_experts(4, 4, 20, 16),
            "layer_types": [_LINEAR, _FULL, _LINEAR],
        },
        wrong_weights=_OF_NETS,
    ),
    _spec(
        "ratio_two",
        "qwen3_5_multimodal",
        rope=_MROPE,
        num_layers=2,
        settings={**_nets(2, 4, 8, 8), "layer_types": [_LINEAR, _FULL]},
    ),
    _spec(
        "ratio_two",
        "qwen3_5_moe_multimodal",
        rope=_MROPE,
        num_layers=2,
        settings={
            **_nets(2, 4, 8, 8),
            **_experts(4, 2, 16, 16),
            "layer_types": [_LINEAR, _FULL],
        },
    ),
)
