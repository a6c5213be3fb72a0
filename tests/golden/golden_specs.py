"""The golden models that make_goldens.py writes, and what each must be sensitive to."""

# The development environment has no torch.
# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import transformers

DEFAULT_EPS = 1e-6
SPECIAL_TOKENS = ("<|pad|>", "<|eos|>", "<|bos|>", "<|im_start|>", "<|im_end|>")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoldenSpec:
    """One golden model.

    Attributes:
        name: The folder is `<family>_<name>`.
        family: A key of `FAMILIES`.
        rope_theta: Base of the rotary embedding.
        rope: `rope_parameters`, where they say more than `rope_theta`.
        settings: Further fields of the config.
        wrong_settings: Fields of the config and values that must be seen if used instead.
        wrong_weights: Endings of parameter names that must be seen if those were zero.
        unit_weights: Endings of names that must be seen if those were one.
        legacy_config: Rewrite config.json as transformers 4 wrote it: top-level `rope_theta`,
            `rope_scaling` and `torch_dtype`. Otherwise it holds `rope_parameters` only.
        num_special: Ids below this are special: in no prompt, in no greedy continuation.
        max_shard_size: Passed to `save_pretrained`.
        dtype: Of the stored weights; goldens are always computed in float32.
        with_tokenizer: Also write a tokenizer and sampling defaults.
    """

    name: str
    family: str = "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool
    rope_theta: float
    rope: dict[str, Any] | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    wrong_settings: tuple[tuple[str, Any], ...] = ()
    wrong_weights: tuple[str, ...] = ()
    unit_weights: tuple[str, ...] = ()
    rms_norm_eps: float = DEFAULT_EPS
    legacy_config: bool = False
    num_special: int = 3
    max_shard_size: str = "1GB"
    dtype: torch.dtype = torch.float32
    with_tokenizer: bool = False

    @property
    def folder_name(self) -> str:
        """Where the golden goes."""
        return f"{self.family}_{self.name}"

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """As transformers 5 has them."""
        return self.rope or {"rope_type": "default", "rope_theta": self.rope_theta}

    @property
    def is_multimodal(self) -> bool:
        """Whether the language model is part of a multimodal one."""
        return self.family in MULTIMODAL

    @property
    def has_experts(self) -> bool:
        """Whether MLPs are mixtures of experts."""
        others = ("qwen3_next", "mixtral", "gpt_oss")
        return "_moe" in self.family or self.family in others or self.has_latents

    @property
    def has_latents(self) -> bool:
        """Whether attention is over latents."""
        return self.family.startswith("deepseek")

    @property
    def is_hybrid(self) -> bool:
        """Whether most layers are gated delta nets."""
        return self.family.startswith(("qwen3_next", "qwen3_5"))

    @property
    def has_offset_norms(self) -> bool:
        """Whether norm weights are stored minus one; those of gated delta nets never are."""
        is_gemma = self.family.startswith("gemma") and not self.family.startswith("gemma4")
        return is_gemma or self.is_hybrid

    @property
    def scales_embeddings(self) -> bool:
        """Whether embeddings are multiplied by sqrt(hidden_size)."""
        return self.family.startswith("gemma")


FAMILIES: dict[str, tuple[Any, Any]] = {
    "deepseek_v2": (transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM),
    "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM),
    "olmo3": (transformers.Olmo3Config, transformers.Olmo3ForCausalLM),
    "smollm3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM),
    "gemma": (transformers.GemmaConfig, transformers.GemmaForCausalLM),
    "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
    "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    "gemma4": (transformers.Gemma4TextConfig, transformers.Gemma4ForCausalLM),
    "gemma4_moe": (transformers.Gemma4TextConfig, transformers.Gemma4ForCausalLM),
    "gemma4_multimodal": (
        transformers.Gemma4TextConfig,
        transformers.Gemma4ForConditionalGeneration,
    ),
    "gemma4_unified": (
        transformers.Gemma4UnifiedTextConfig,
        transformers.Gemma4UnifiedForConditionalGeneration,
    ),
    "gemma3_multimodal": (
        transformers.Gemma3TextConfig,
        transformers.Gemma3ForConditionalGeneration,
    ),
    "qwen3_next": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
    "qwen3_5": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
    "qwen3_5_moe": (transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM),
    "qwen3_5_multimodal": (
        transformers.Qwen3_5TextConfig,
        transformers.Qwen3_5ForConditionalGeneration,
    ),
    "qwen3_5_moe_multimodal": (
        transformers.Qwen3_5MoeTextConfig,
        transformers.Qwen3_5MoeForConditionalGeneration,
    ),
}
"""Config of the language model, and model classes of transformers."""

VISION_CONFIG = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "vision_use_head": False,
}
"""The rest of a multimodal Gemma 3, of which nothing is computed."""


def _of_gemma3(text: Any) -> Any:
    vision = transformers.SiglipVisionConfig(**VISION_CONFIG)
    return transformers.Gemma3Config(text_config=text, vision_config=vision)


QWEN_VISION_CONFIG = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 1,
    "patch_size": 2,
    "spatial_merge_size": 1,
    "num_position_embeddings": 4,
    "out_hidden_size": 32,
}
"""The same of a Qwen3.5."""


MULTIMODAL: dict[str, Callable[[Any], Any]] = {
    "qwen3_5_multimodal": lambda text: transformers.Qwen3_5Config(
        text_config=text.to_dict(),
        vision_config=QWEN_VISION_CONFIG,
        tie_word_embeddings=text.tie_word_embeddings,
    ),
    "qwen3_5_moe_multimodal": lambda text: transformers.Qwen3_5MoeConfig(
        text_config=text.to_dict(),
        vision_config=QWEN_VISION_CONFIG,
        tie_word_embeddings=text.tie_word_embeddings,
    ),
    "gemma3_multimodal": _of_gemma3,
    "gemma4_multimodal": lambda text: transformers.Gemma4Config(text_config=text),
    "gemma4_unified": lambda text: transformers.Gemma4UnifiedConfig(text_config=text),
}
"""Configs of multimodal models, by family, around that of the language model."""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SLIDING_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
GLOBAL_ROPE = {"rope_type": "linear", "rope_theta": 100_000.0, "factor": 4.0}


def _gemma3_rope(**changes: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_attention": SLIDING_ROPE, "full_attention": GLOBAL_ROPE} | changes


PROPORTIONAL_ROPE = {
    "rope_type": "proportional",
    "rope_theta": 100_000.0,
    "partial_rotary_factor": 0.25,
}


def _gemma4_rope(**changes: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_attention": SLIDING_ROPE, "full_attention": PROPORTIONAL_ROPE} | changes


_SLIDING, _FULL = "sliding_attention", "full_attention"
GEMMA4_SETTINGS: dict[str, Any] = {
    "sliding_window": 13,
    "final_logit_softcapping": 16.0,
    "vocab_size_per_layer_input": 112,
}
GEMMA4_WRONG_SETTINGS: tuple[tuple[str, Any], ...] = (
    ("sliding_window", 12),
    ("sliding_window", 14),
    ("final_logit_softcapping", None),
    ("rope_parameters", _gemma4_rope(sliding_attention=GLOBAL_ROPE)),
    (
        "rope_parameters",
        _gemma4_rope(full_attention=PROPORTIONAL_ROPE | {"rope_theta": 10_000.0}),
    ),
    (
        "rope_parameters",
        _gemma4_rope(full_attention=PROPORTIONAL_ROPE | {"partial_rotary_factor": 0.5}),
    ),
)


def _moe(*, num_experts: int, per_token: int, width: int, norm_topk_prob: bool) -> dict[str, Any]:
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": width,
        "norm_topk_prob": norm_topk_prob,
    }


def _shape(
    vocab: int, hidden: int, intermediate: int, *, num_layers: int, heads: tuple[int, int, int]
) -> dict[str, Any]:
    """Fields of a GoldenSpec; heads: of queries, of keys and values, and their dimension."""
    fields = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": intermediate}
    names = ("num_heads", "num_kv_heads", "head_dim")
    return fields | {"num_layers": num_layers} | dict(zip(names, heads, strict=True))


_MLP = ("gate", "up", "down")
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_slow": 0.25,
    "truncate": False,
    "attention_factor": 1.4,
}
_OLMO_NORMS = tuple(
    f"{name}.weight"
    for name in ("q_norm", "k_norm", "post_attention_layernorm", "post_feedforward_layernorm")
)

SPECS = (
    GoldenSpec(
        name="gqa_tied",
        **_shape(320, 64, 96, num_layers=2, heads=(4, 2, 16)),
        tied=True,
        rope_theta=1_000_000.0,
        num_special=len(SPECIAL_TOKENS),
        with_tokenizer=True,
    ),
    GoldenSpec(
        name="mqa_untied",
        **_shape(160, 32, 64, num_layers=3, heads=(8, 1, 16)),
        tied=False,
        rope_theta=10_000.0,
    ),
    # A theta that is nobody's default, and an eps large enough to be seen in the logits.
    GoldenSpec(
        name="mha_sharded",
        **_shape(128, 48, 80, num_layers=2, heads=(4, 4, 12)),
        tied=False,
        rope_theta=30_000.0,
        rms_norm_eps=1e-2,
        legacy_config=True,
        max_shard_size="64KB",
    ),
    GoldenSpec(
        name="bf16_tied",
        **_shape(256, 64, 96, num_layers=2, heads=(4, 2, 32)),
        tied=True,
        rope_theta=250_000.0,
        dtype=torch.bfloat16,
    ),
    GoldenSpec(
        name="bias_untied",
        family="qwen2",
        **_shape(112, 32, 48, num_layers=2, heads=(4, 2, 8)),
        tied=False,
        rope_theta=1_000_000.0,
        wrong_weights=("q_proj.bias", "k_proj.bias", "v_proj.bias"),
    ),
    GoldenSpec(
        name="tied",
        family="llama",
        **_shape(112, 32, 48, num_layers=2, heads=(4, 1, 16)),
        tied=True,
        rope_theta=500_000.0,
        rms_norm_eps=1e-5,
    ),
    # Its second layer has no rotary embedding; by the default interval it would have one.
    GoldenSpec(
        name="every_second",
        family="smollm3",
        **_shape(112, 32, 48, num_layers=2, heads=(4, 2, 8)),
        tied=True,
        rope_theta=10_000.0,
        settings={"no_rope_layer_interval": 2},
        wrong_settings=(("no_rope_layers", [1, 1]), ("no_rope_layers", [0, 1])),
    ),
    # Llama 3.1 in transformers 4's words; of the 8 timescales each of the three kinds is there.
    GoldenSpec(
        name="scaled_untied",
        family="llama",
        **_shape(112, 32, 48, num_layers=2, heads=(4, 2, 16)),
        tied=False,
        rope_theta=10_000.0,
        rope=LLAMA3_ROPE,
        legacy_config=True,
        wrong_settings=(
            ("rope_parameters", {"rope_type": "default", "rope_theta": 10_000.0}),
            ("rope_parameters", LLAMA3_ROPE | {"factor": 2.0}),
            ("rope_parameters", LLAMA3_ROPE | {"low_freq_factor": 0.25}),
            ("rope_parameters", LLAMA3_ROPE | {"high_freq_factor": 1.5}),
            ("rope_parameters", LLAMA3_ROPE | {"original_max_position_embeddings": 64}),
        ),
    ),
    GoldenSpec(
        name="bias_untied",
        family="llama",
        **_shape(112, 32, 48, num_layers=2, heads=(4, 2, 8)),
        tied=False,
        rope_theta=500_000.0,
        settings={"attention_bias": True, "mlp_bias": True},
        wrong_weights=tuple(f"{name}_proj.bias" for name in ("q", "k", "v", "o", *_MLP)),
    ),
    GoldenSpec(
        name="attention_bias_tied",
        family="llama",
        **_shape(112, 48, 72, num_layers=2, heads=(6, 2, 12)),
        tied=True,
        rope_theta=500_000.0,
        settings={"attention_bias": True},
        wrong_weights=tuple(f"{name}_proj.bias" for name in "qkvo"),
    ),
    # As v0.1: all layers slide.
    GoldenSpec(
        name="window",
        family="mistral",
        **_shape(112, 32, 48, num_layers=2, heads=(6, 2, 16)),
        tied=False,
        rope_theta=20_000.0,
        rms_norm_eps=1e-5,
        settings={"sliding_window": 13},
        wrong_settings=(
            ("sliding_window", 12),
            ("sliding_window", 14),
            ("sliding_window", None),
        ),
    ),
    # As v0.2 and v0.3, in transformers 4's words.
    GoldenSpec(
        name="full",
        family="mistral",
        **_shape(112, 32, 48, num_layers=2, heads=(4, 1, 16)),
        tied=False,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-5,
        settings={"sliding_window": None},
        wrong_settings=(("sliding_window", 13),),
        legacy_config=True,
    ),
    GoldenSpec(
        name="mqa",
        family="gemma",
        **_shape(112, 32, 48, num_layers=2, heads=(4, 1, 16)),
        tied=True,
        rope_theta=10_000.0,
        wrong_settings=(("hidden_act", "silu"),),
    ),
    GoldenSpec(
        name="window",
        family="gemma2",
        **_shape(112, 32, 48, num_layers=3, heads=(4, 2, 16)),
        tied=True,
        rope_theta=10_000.0,
        settings={
            "sliding_window": 13,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 16.0,
        },
        wrong_settings=(
            ("sliding_window", 12),
            ("sliding_window", 14),
            ("layer_types", ["full_attention"] * 3),
            ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
            ("query_pre_attn_scalar", 16),
            ("attn_logit_softcapping", None),
            ("attn_logit_softcapping", 8.0),
            ("final_logit_softcapping", None),
            ("hidden_activation", "silu"),
        ),
        wrong_weights=("post_attention_layernorm.weight", "post_feedforward_layernorm.weight"),
    ),
    GoldenSpec(
        name="window",
        family="gemma3",
        **_shape(112, 32, 48, num_layers=3, heads=(4, 2, 16)),
        tied=True,
        rope_theta=100_000.0,
        rope=_gemma3_rope(),
        settings={
            "sliding_window": 13,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
        wrong_settings=(
            ("sliding_window", 12),
            ("sliding_window", 14),
            ("layer_types", ["full_attention"] * 3),
            ("layer_types", ["sliding_attention"] * 3),
            ("query_pre_attn_scalar", 16),
            ("rope_parameters", _gemma3_rope(full_attention=SLIDING_ROPE)),
            ("rope_parameters", _gemma3_rope(sliding_attention=GLOBAL_ROPE)),
            ("rope_parameters", _gemma3_rope(full_attention=GLOBAL_ROPE | {"factor": 1.0})),
        ),
        wrong_weights=("q_norm.weight", "k_norm.weight", "post_attention_layernorm.weight"),
    ),
    # As E2B: the last two layers read the keys of the second and third, with wider MLPs.
    GoldenSpec(
        name="shared_keys",
        family="gemma4",
        **_shape(112, 32, 48, num_layers=5, heads=(4, 1, 16)),
        tied=True,
        rope_theta=100_000.0,
        rope=_gemma4_rope(),
        settings={
            **GEMMA4_SETTINGS,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL],
        },
        wrong_settings=GEMMA4_WRONG_SETTINGS,
        wrong_weights=(
            "q_norm.weight",
            "k_norm.weight",
            "embed_tokens_per_layer.weight",
            "per_layer_model_projection.weight",
            "per_layer_input_gate.weight",
            "post_per_layer_input_norm.weight",
        ),
        unit_weights=("layer_scalar", "per_layer_projection_norm.weight"),
    ),
    # As 31B: three query heads share keys in sliding layers, six in full ones, whose keys are their
    # values.
    GoldenSpec(
        name="keys_as_values",
        family="gemma4_multimodal",
        **_shape(112, 32, 48, num_layers=3, heads=(6, 2, 16)),
        tied=True,
        rope_theta=100_000.0,
        rope=_gemma4_rope(),
        settings={
            **GEMMA4_SETTINGS,
            "global_head_dim": 24,
            "hidden_size_per_layer_input": 0,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "layer_types": [_SLIDING, _SLIDING, _FULL],
        },
        wrong_settings=GEMMA4_WRONG_SETTINGS,
        wrong_weights=("q_norm.weight", "k_norm.weight"),
        unit_weights=("layer_scalar",),
    ),
    GoldenSpec(
        name="window",
        family="gemma3_multimodal",
        **_shape(112, 32, 48, num_layers=3, heads=(4, 1, 16)),
        tied=True,
        rope_theta=100_000.0,
        rope=_gemma3_rope(),
        settings={
            "sliding_window": 13,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        wrong_settings=(
            ("sliding_window", 12),
            ("layer_types", ["full_attention"] * 3),
            ("query_pre_attn_scalar", 16),
        ),
        wrong_weights=("q_norm.weight", "post_attention_layernorm.weight"),
    ),
    # As 26B-A4B: experts beside the MLP.
    GoldenSpec(
        name="keys_as_values",
        family="gemma4_moe",
        **_shape(112, 32, 24, num_layers=2, heads=(4, 2, 16)),
        tied=True,
        rope_theta=100_000.0,
        rope=_gemma4_rope(),
        settings={
            **GEMMA4_SETTINGS,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "layer_types": [_SLIDING, _FULL],
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 20,
        },
        wrong_settings=(("sliding_window", 12), ("top_k_experts", 1), ("top_k_experts", 3)),
        wrong_weights=("router.proj.weight", "experts.down_proj", "mlp.down_proj.weight"),
        unit_weights=(
            "layer_scalar",
            "router.scale",
            "router.per_expert_scale",
            "post_feedforward_layernorm_1.weight",
            "post_feedforward_layernorm_2.weight",
            "pre_feedforward_layernorm_2.weight",
        ),
    ),
    # As 12B, whose class has neither further embeddings nor experts.
    GoldenSpec(
        name="window",
        family="gemma4_unified",
        **_shape(112, 32, 48, num_layers=2, heads=(4, 2, 16)),
        tied=True,
        rope_theta=100_000.0,
        rope=_gemma4_rope(),
        settings={
            "sliding_window": 13,
            "final_logit_softcapping": 16.0,
            "global_head_dim": 32,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "layer_types": [_SLIDING, _FULL],
        },
        wrong_settings=(("sliding_window", 12), ("sliding_window", 14)),
        unit_weights=("layer_scalar",),
    ),
    GoldenSpec(
        name="normalised",
        family="qwen3_moe",
        **_shape(112, 32, 72, num_layers=2, heads=(4, 2, 16)),
        tied=False,
        rope_theta=1_000_000.0,
        settings=_moe(num_experts=8, per_token=2, width=24, norm_topk_prob=True),
        wrong_settings=(("num_experts_per_tok", 1), ("norm_topk_prob", False)),
        wrong_weights=("mlp.gate.weight", "q_norm.weight", "k_norm.weight"),
    ),
    GoldenSpec(
        name="window",
        family="gpt_oss",
        **_shape(112, 32, 24, num_layers=2, heads=(4, 2, 16)),
        tied=False,
        rope_theta=150_000.0,
        settings={"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 13},
        wrong_settings=(
            ("num_experts_per_tok", 2),
            ("sliding_window", 12),
            ("sliding_window", 14),
        ),
        wrong_weights=(
            *("sinks", "router.weight", "router.bias", "gate_up_proj_bias", "down_proj_bias"),
            *("q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias"),
        ),
    ),
    GoldenSpec(
        name="window",
        family="mixtral",
        **_shape(96, 32, 24, num_layers=2, heads=(4, 2, 8)),
        tied=False,
        rope_theta=50_000.0,
        settings={"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 13},
        wrong_settings=(("num_experts_per_tok", 1), ("sliding_window", None)),
        wrong_weights=("mlp.gate.weight",),
    ),
    GoldenSpec(
        name="yarn",
        family="olmo2",
        **_shape(96, 32, 40, num_layers=2, heads=(4, 2, 8)),
        tied=False,
        rope_theta=10_000.0,
        rope=_YARN,
        wrong_settings=(
            ("rope_parameters", {"rope_type": "default", "rope_theta": 10_000.0}),
            ("rope_parameters", _YARN | {"factor": 2.0}),
            ("rope_parameters", _YARN | {"attention_factor": 1.0}),
            ("rope_parameters", _YARN | {"beta_slow": 1.0}),
            ("rope_parameters", _YARN | {"truncate": True}),
            ("rope_parameters", _YARN | {"original_max_position_embeddings": 128}),
        ),
        wrong_weights=_OLMO_NORMS,
    ),
    # Made by transformers 5.12, which has one embedding for both types of layer.
    GoldenSpec(
        name="window",
        family="olmo3",
        **_shape(96, 32, 40, num_layers=4, heads=(4, 4, 8)),
        tied=False,
        rope_theta=500_000.0,
        settings={"sliding_window": 13},
        wrong_settings=(
            ("sliding_window", 12),
            ("layer_types", [_SLIDING, _SLIDING, _FULL, _FULL]),
        ),
        wrong_weights=_OLMO_NORMS,
    ),
    # Nothing divides anything: heads 3 to 1, 5 experts of 20 channels, 3 of them for a token.
    GoldenSpec(
        name="odd_sharded",
        family="qwen3_moe",
        **_shape(112, 36, 44, num_layers=3, heads=(6, 2, 12)),
        tied=False,
        rope_theta=30_000.0,
        settings=_moe(num_experts=5, per_token=3, width=20, norm_topk_prob=False),
        wrong_settings=(
            ("num_experts_per_tok", 2),
            ("num_experts_per_tok", 4),
            ("norm_topk_prob", True),
        ),
        wrong_weights=("mlp.gate.weight",),
        legacy_config=True,
        max_shard_size="64KB",
    ),
)
