"""Tiny model folders of each family: config.json as published, and the shapes of its weights.

Runs without JAX and without torch, so that the goldens' script and the tests share it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Config = dict[str, Any]
"""The contents of a config.json."""

Shapes = dict[str, tuple[int, ...]]
"""Shapes of weights by the names that Hugging Face stores."""

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, EXPERTS = 32, 4, 2, 8, 64, 4

_SIZES: Config = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_LLAMA: Config = {**_SIZES, "hidden_act": "silu", "rms_norm_eps": 1e-5}
_THETA = {"rope_type": "default", "rope_theta": 50_000.0}
_ROPE = {"rope_parameters": _THETA}
_UNTIED, _TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
_MOE = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_NETS = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": {**_THETA, "partial_rotary_factor": 0.5},
}
_OLMO_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "attention_factor": 1.2,
}
_GEMMA: Config = {**_SIZES, "head_dim": HEAD_DIM, "rms_norm_eps": 1e-6, "eos_token_id": [1, 3]}
_GELU = {"hidden_activation": "gelu_pytorch_tanh"}
_WINDOW = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA3 = {
    **_GEMMA,
    **_GELU,
    **_WINDOW,
    "query_pre_attn_scalar": 12,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    },
}
_GEMMA4 = {
    **_GEMMA,
    **_GELU,
    **_WINDOW,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "final_logit_softcapping": 20.0,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.5,
            "rope_theta": 50_000.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    },
}


class Family(NamedTuple):
    """A kind of folder.

    Attributes:
        architecture: Class that config.json names.
        model_type: Model type that config.json names.
        text: Settings of the language model, and whether its embeddings are tied.
        layer: (settings, layer) -> shapes of a layer's weights, without their prefix.
        text_type: Model type of the language model inside a multimodal folder; None for others.
        prefix: Prefix of the language model's names in place of "model.".
        vision: Settings of the image tower of a multimodal folder.
        head: Name of the output projection.
    """

    architecture: str
    model_type: str
    text: Config
    layer: Callable[[Config, int], Shapes]
    text_type: str | None = None
    prefix: str = "model."
    vision: Config | None = None
    head: str = "lm_head.weight"

    @property
    def is_multimodal(self) -> bool:
        """Whether the language model's settings are nested."""
        return self.text_type is not None

    def config(self) -> Config:
        """The config.json of a folder that transformers 5 wrote."""
        text = copy.deepcopy(self.text)
        outer = {"architectures": [self.architecture], "model_type": self.model_type}
        if not self.is_multimodal:
            return {**outer, **text}
        tied = text.pop("tie_word_embeddings")
        nested = {"text_config": {"model_type": self.text_type, **text}}
        vision = {} if self.vision is None else {"vision_config": copy.deepcopy(self.vision)}
        return {**outer, **nested, **vision, "tie_word_embeddings": tied}

    def shapes(self, text: Config) -> Shapes:
        """Shapes of all weights, with a head of their own."""
        hidden, prefix = text["hidden_size"], self.prefix
        found: Shapes = {f"{prefix}embed_tokens.weight": (text["vocab_size"], hidden)}
        for layer in range(text["num_hidden_layers"]):
            for name, shape in self.layer(text, layer).items():
                found[f"{prefix}layers.{layer}.{name}"] = shape
        if text.get("hidden_size_per_layer_input"):
            width = text["num_hidden_layers"] * text["hidden_size_per_layer_input"]
            found[f"{prefix}embed_tokens_per_layer.weight"] = (text["vocab_size"], width)
            found[f"{prefix}per_layer_model_projection.weight"] = (width, hidden)
            found[f"{prefix}per_layer_projection_norm.weight"] = (
                text["hidden_size_per_layer_input"],
            )
        found[f"{prefix}norm.weight"] = (hidden,)
        found[self.head] = (text["vocab_size"], hidden)
        return found


def head_dim(text: Mapping[str, Any]) -> int:
    """Channels of a head of the stored weights."""
    return text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]


def _norms(text: Config, *names: str) -> Shapes:
    return {f"{name}.weight": (text["hidden_size"],) for name in names}


def _attention(text: Config, dim: int, kv_heads: int, gate: int = 1) -> Shapes:
    hidden, wide = text["hidden_size"], text["num_attention_heads"] * dim
    return {
        "self_attn.q_proj.weight": (gate * wide, hidden),
        "self_attn.k_proj.weight": (kv_heads * dim, hidden),
        "self_attn.v_proj.weight": (kv_heads * dim, hidden),
        "self_attn.o_proj.weight": (hidden, wide),
    }


def _qk_norms(dim: int) -> Shapes:
    return {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}


def _mlp(text: Config, size: int, name: str = "mlp") -> Shapes:
    hidden = text["hidden_size"]
    return {
        f"{name}.gate_proj.weight": (size, hidden),
        f"{name}.up_proj.weight": (size, hidden),
        f"{name}.down_proj.weight": (hidden, size),
    }


def _experts(text: Config) -> Shapes:
    found: Shapes = {"mlp.gate.weight": (text["num_experts"], text["hidden_size"])}
    for expert in range(text["num_experts"]):
        found |= _mlp(text, text["moe_intermediate_size"], f"mlp.experts.{expert}")
    return found


def _llama_layer(text: Config, layer: int) -> Shapes:
    del layer
    return {
        **_norms(text, "input_layernorm", "post_attention_layernorm"),
        **_attention(text, head_dim(text), text["num_key_value_heads"]),
        **_mlp(text, text["intermediate_size"]),
    }


def _qwen2_layer(text: Config, layer: int) -> Shapes:
    found = _llama_layer(text, layer)
    for name in ("q", "k", "v"):
        weight = found[f"self_attn.{name}_proj.weight"]
        found[f"self_attn.{name}_proj.bias"] = weight[:1]
    return found


def _qwen3_layer(text: Config, layer: int) -> Shapes:
    return _llama_layer(text, layer) | _qk_norms(head_dim(text))


def _qwen3_moe_layer(text: Config, layer: int) -> Shapes:
    found = _qwen3_layer(text, layer) | _experts(text)
    return {name: shape for name, shape in found.items() if name not in _mlp(text, 1)}


def _mixtral_layer(text: Config, layer: int) -> Shapes:
    mlp, names = _mlp(text, text["intermediate_size"]), ("w1", "w3", "w2")
    found = _llama_layer(text, layer)
    found = {name: shape for name, shape in found.items() if name not in mlp}
    found["block_sparse_moe.gate.weight"] = (text["num_local_experts"], text["hidden_size"])
    for expert in range(text["num_local_experts"]):
        for name, shape in zip(names, mlp.values(), strict=True):
            found[f"block_sparse_moe.experts.{expert}.{name}.weight"] = shape
    return found


def _olmo_layer(text: Config, layer: int) -> Shapes:
    found = _llama_layer(text, layer) | _norms(text, "post_feedforward_layernorm")
    del found["input_layernorm.weight"]
    for name in ("q", "k"):
        rows = found[f"self_attn.{name}_proj.weight"][:1]
        found[f"self_attn.{name}_norm.weight"] = rows
    return found


def _net(text: Config, is_grouped: bool) -> Shapes:
    hidden = text["hidden_size"]
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    num = text["linear_num_value_heads"]
    values = num * text["linear_value_head_dim"]
    if is_grouped:
        inputs: Shapes = {
            "linear_attn.in_proj_qkvz.weight": (2 * keys + 2 * values, hidden),
            "linear_attn.in_proj_ba.weight": (2 * num, hidden),
        }
    else:
        inputs = {
            "linear_attn.in_proj_qkv.weight": (2 * keys + values, hidden),
            "linear_attn.in_proj_z.weight": (values, hidden),
            "linear_attn.in_proj_b.weight": (num, hidden),
            "linear_attn.in_proj_a.weight": (num, hidden),
        }
    return {
        **inputs,
        "linear_attn.conv1d.weight": (2 * keys + values, 1, text["linear_conv_kernel_dim"]),
        "linear_attn.A_log": (num,),
        "linear_attn.dt_bias": (num,),
        "linear_attn.norm.weight": (text["linear_value_head_dim"],),
        "linear_attn.out_proj.weight": (hidden, values),
    }


def _hybrid_layer(text: Config, layer: int, *, is_grouped: bool, has_experts: bool) -> Shapes:
    found = _norms(text, "input_layernorm", "post_attention_layernorm")
    if layer % 2 == 0:
        found |= _net(text, is_grouped)
    else:
        dim = head_dim(text)
        found |= _attention(text, dim, text["num_key_value_heads"], 2) | _qk_norms(dim)
    if not has_experts:
        return found | _mlp(text, text["intermediate_size"])
    shared = _mlp(text, text["shared_expert_intermediate_size"], "mlp.shared_expert")
    gate = {"mlp.shared_expert_gate.weight": (1, text["hidden_size"])}
    return found | _experts(text) | shared | gate


def _next_layer(text: Config, layer: int) -> Shapes:
    return _hybrid_layer(text, layer, is_grouped=True, has_experts=True)


def _qwen3_5_layer(text: Config, layer: int) -> Shapes:
    return _hybrid_layer(text, layer, is_grouped=False, has_experts=False)


def _qwen3_5_moe_layer(text: Config, layer: int) -> Shapes:
    return _hybrid_layer(text, layer, is_grouped=False, has_experts=True)


def _gemma2_layer(text: Config, layer: int) -> Shapes:
    more = _norms(text, "pre_feedforward_layernorm", "post_feedforward_layernorm")
    return _llama_layer(text, layer) | more


def _gemma3_layer(text: Config, layer: int) -> Shapes:
    return _gemma2_layer(text, layer) | _qk_norms(head_dim(text))


def _gemma4_layer(text: Config, layer: int) -> Shapes:
    is_full = layer == text["num_hidden_layers"] - 1
    dim = text["global_head_dim"] if is_full else head_dim(text)
    found = _gemma2_layer(text, layer) | _qk_norms(dim)
    found |= _attention(text, dim, text["num_key_value_heads"])
    found["layer_scalar"] = (1,)
    size, hidden = text.get("hidden_size_per_layer_input"), text["hidden_size"]
    if size:
        found["per_layer_input_gate.weight"] = (size, hidden)
        found["per_layer_projection.weight"] = (hidden, size)
        found["post_per_layer_input_norm.weight"] = (hidden,)
    return found


def _deepseek_layer(text: Config, layer: int) -> Shapes:
    hidden, heads, rank = text["hidden_size"], text["num_attention_heads"], text["kv_lora_rank"]
    nope, rope, value = (text[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    query = text["q_lora_rank"]
    found = _norms(text, "input_layernorm", "post_attention_layernorm") | {
        "self_attn.kv_a_proj_with_mqa.weight": (rank + rope, hidden),
        "self_attn.kv_a_layernorm.weight": (rank,),
        "self_attn.kv_b_proj.weight": (heads * (nope + value), rank),
        "self_attn.o_proj.weight": (hidden, heads * value),
    }
    name = "q_proj" if query is None else "q_b_proj"
    found[f"self_attn.{name}.weight"] = (heads * (nope + rope), query or hidden)
    if query is not None:
        found["self_attn.q_a_proj.weight"] = (query, hidden)
        found["self_attn.q_a_layernorm.weight"] = (query,)
    if layer < text["first_k_dense_replace"]:
        return found | _mlp(text, text["intermediate_size"])
    found["mlp.gate.weight"] = (text["n_routed_experts"], hidden)
    if "topk_method" not in text:  # V3
        found["mlp.gate.e_score_correction_bias"] = (text["n_routed_experts"],)
    width = text["moe_intermediate_size"]
    for expert in range(text["n_routed_experts"]):
        found |= _mlp(text, width, f"mlp.experts.{expert}")
    return found | _mlp(text, width * text["n_shared_experts"], "mlp.shared_experts")


_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 16,
}
_SHARED = {**_MOE, "shared_expert_intermediate_size": 16}
_QWEN3_5_MOE = {**_LLAMA, **_NETS, **_SHARED, **_UNTIED}
del _QWEN3_5_MOE["intermediate_size"]
_NESTED = "model.language_model."

_DEEPSEEK: Config = {
    **_LLAMA,
    **_UNTIED,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 2 * EXPERTS,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "routed_scaling_factor": 1.5,
    "n_group": 4,
    "topk_group": 2,
    "rope_parameters": {
        **_THETA,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", "llama", {**_LLAMA, **_ROPE, **_UNTIED}, _llama_layer),
    "mistral": Family(
        "MistralForCausalLM",
        "mistral",
        {**_LLAMA, **_ROPE, **_UNTIED, "head_dim": HEAD_DIM, "sliding_window": 9},
        _llama_layer,
    ),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", {**_LLAMA, **_ROPE, **_UNTIED}, _qwen2_layer),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        "qwen3",
        {**_LLAMA, **_ROPE, **_TIED, "head_dim": 16},
        _qwen3_layer,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {**_LLAMA, **_ROPE, **_UNTIED, **_MOE, "head_dim": 16, "norm_topk_prob": True},
        _qwen3_moe_layer,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        "mixtral",
        {**_LLAMA, **_ROPE, **_UNTIED, "num_local_experts": EXPERTS, "num_experts_per_tok": 2},
        _mixtral_layer,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        "smollm3",
        {**_LLAMA, **_ROPE, **_TIED, "no_rope_layers": [1, 0], "pad_token_id": 0},
        _llama_layer,
    ),
    "olmo2": Family("Olmo2ForCausalLM", "olmo2", {**_LLAMA, **_ROPE, **_UNTIED}, _olmo_layer),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        "olmo3",
        {
            **_LLAMA,
            **_UNTIED,
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "rope_parameters": {
                "full_attention": {**_THETA, **_OLMO_YARN},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
        _olmo_layer,
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        {**_LLAMA, **_NETS, **_SHARED, **_UNTIED, "norm_topk_prob": True},
        _next_layer,
    ),
    "qwen3_5": Family(
        "Qwen3_5ForCausalLM", "qwen3_5_text", {**_LLAMA, **_NETS, **_TIED}, _qwen3_5_layer
    ),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _QWEN3_5_MOE, _qwen3_5_moe_layer
    ),
    "qwen3_5_multimodal": Family(
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5",
        {**_LLAMA, **_NETS, **_UNTIED},
        _qwen3_5_layer,
        "qwen3_5_text",
        _NESTED,
        _QWEN_VISION,
    ),
    "qwen3_5_moe_multimodal": Family(
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe",
        _QWEN3_5_MOE,
        _qwen3_5_moe_layer,
        "qwen3_5_moe_text",
        _NESTED,
        _QWEN_VISION,
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        "gemma",
        {**_GEMMA, **_ROPE, **_TIED, "hidden_act": "gelu_pytorch_tanh"},
        _llama_layer,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "gemma2",
        {
            **_GEMMA,
            **_GELU,
            **_ROPE,
            **_WINDOW,
            **_TIED,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 8.0,
            "final_logit_softcapping": 10.0,
        },
        _gemma2_layer,
    ),
    "gemma3": Family("Gemma3ForCausalLM", "gemma3_text", {**_GEMMA3, **_TIED}, _gemma3_layer),
    "gemma3_multimodal": Family(
        "Gemma3ForConditionalGeneration",
        "gemma3",
        {**_GEMMA3, **_TIED},
        _gemma3_layer,
        "gemma3_text",
        "language_model.model.",
        _SIGLIP,
        "language_model.lm_head.weight",
    ),
    "gemma4": Family("Gemma4ForCausalLM", "gemma4_text", {**_GEMMA4, **_TIED}, _gemma4_layer),
    "gemma4_multimodal": Family(
        "Gemma4ForConditionalGeneration",
        "gemma4",
        {**_GEMMA4, **_TIED},
        _gemma4_layer,
        "gemma4_text",
        _NESTED,
    ),
    "gemma4_unified": Family(
        "Gemma4UnifiedForConditionalGeneration",
        "gemma4_unified",
        {k: v for k, v in {**_GEMMA4, **_TIED}.items() if "per_layer_input" not in k},
        _gemma4_layer,
        "gemma4_unified_text",
        _NESTED,
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        {**_DEEPSEEK, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
        _deepseek_layer,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM", "deepseek_v3", {**_DEEPSEEK, "q_lora_rank": 12}, _deepseek_layer
    ),
}
