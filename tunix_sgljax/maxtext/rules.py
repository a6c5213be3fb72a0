"""MaxText's weights as rules for the engine.

No transposes but those of the head and of convolutions: MaxText's kernels are [in, out], with heads
as an axis of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sgljax_engine import Rule
from tunix_sgljax.maxtext.fields import HYBRIDS, get
from tunix_sgljax.maxtext.layers import places
from tunix_sgljax.maxtext.model_config import is_interleaved, latents, rounds_head

_MLP = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}
_CONVOLUTION = "attention.conv1d"


def _kernel(theirs: str, ours: str) -> tuple[str, str]:
    return f"{theirs}.kernel", f"{ours}.weight"


def _norm(theirs: str, ours: str) -> tuple[str, str]:
    return f"{theirs}.scale", f"{ours}.weight"


def _mlp(theirs: str, own: str = "mlp") -> tuple[tuple[str, str], ...]:
    return tuple(_kernel(f"{theirs}.{name}", f"{own}.{ours}") for name, ours in _MLP.items())


def _experts(theirs: str, ours: str, router: str) -> tuple[tuple[str, str], ...]:
    stacks = ((f"{theirs}.{name}", f"{ours}.{own}.weight") for name, own in _MLP.items())
    return (_kernel(f"{theirs}.gate", router), *stacks)


_PROJECTIONS = ("query", "key", "value", "out")


def _attention(theirs: str) -> tuple[tuple[str, str], ...]:
    return tuple(_kernel(f"{theirs}.{name}", f"self_attn.{name[0]}_proj") for name in _PROJECTIONS)


def _biases(theirs: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"{theirs}.{name}.bias", f"self_attn.{name[0]}_proj.bias") for name in _PROJECTIONS
    )


def _qk_norms(theirs: str) -> tuple[tuple[str, str], ...]:
    return tuple(_norm(f"{theirs}.{x}_norm", f"self_attn.{x[0]}_norm") for x in ("query", "key"))


_ATTENTION, _QK_NORMS = _attention("self_attention"), _qk_norms("self_attention")
_LLAMA_NORMS = (
    _norm("pre_self_attention_layer_norm", "input_layernorm"),
    _norm("post_self_attention_layer_norm", "post_attention_layernorm"),
)
_LLAMA = (*_ATTENTION, *_LLAMA_NORMS)
_GEMMA2 = (
    *_ATTENTION,
    *_mlp("mlp"),
    _norm("pre_self_attention_norm", "input_layernorm"),
    _norm("post_self_attention_norm", "post_attention_layernorm"),
    _norm("pre_ffw_norm", "pre_feedforward_layernorm"),
    _norm("post_ffw_norm", "post_feedforward_layernorm"),
)
_GEMMA4 = (
    *_GEMMA2,
    *_QK_NORMS,
    ("layer_scalar", "layer_scalar"),
    *_mlp("mlp.moe_block.shared_experts"),
    *_experts("mlp.moe_block.MoeBlock_0", "experts", "router.proj"),
    ("mlp.moe_block.MoeBlock_0.per_expert_scale", "router.per_expert_scale"),
    ("mlp.pre_forward_scale_2", "router.scale"),
    *(
        _norm(f"mlp.{name}", name)
        for name in (
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_1",
            "post_feedforward_layernorm_2",
        )
    ),
    _kernel("per_layer_input_gate", "per_layer_input_gate"),
    _kernel("per_layer_projection", "per_layer_projection"),
    _norm("post_per_layer_input_norm", "post_per_layer_input_norm"),
)
_HYBRID = (
    _norm("input_layernorm", "input_layernorm"),
    _norm("post_attention_layernorm", "post_attention_layernorm"),
    *(
        _kernel(f"attention.{name}", f"linear_attn.{name}")
        for name in ("in_proj_qkvz", "in_proj_ba", "out_proj")
    ),
    *((f"attention.{name}", f"linear_attn.{name}") for name in ("A_log", "dt_bias")),
    _kernel(_CONVOLUTION, "linear_attn.conv1d"),
    _norm("attention.norm.rms_norm", "linear_attn.norm"),
    *_attention("attention.attention"),
    *_qk_norms("attention.attention"),
    *_experts("mlp.routed_experts", "mlp.experts", "mlp.gate"),
    *_mlp("mlp.shared_expert", "mlp.shared_expert"),
    _kernel("mlp.shared_expert_gate", "mlp.shared_expert_gate"),
)
_GPT_OSS = (
    *_attention("GptOssAttention"),
    *_biases("GptOssAttention"),
    ("GptOssAttention.sinks", "self_attn.sinks"),
    *_LLAMA_NORMS,
    *_experts("GptOssMlp", "mlp.experts", "mlp.router"),
    *((f"GptOssMlp.{name}_bias", f"mlp.experts.{ours}.bias") for name, ours in _MLP.items()),
    ("GptOssMlp.gate.bias", "mlp.router.bias"),
)
_OLMO3 = (
    *_attention("attention"),
    *_biases("attention"),
    *_qk_norms("attention"),
    *_mlp("mlp"),
    _norm("post_self_attention_layer_norm", "post_attention_layernorm"),
    _norm("post_mlp_layer_norm", "post_feedforward_layernorm"),
)
_KEYS_OF_LATENTS, _VALUES_OF_LATENTS = (f"self_attn.{x}_b_proj.weight" for x in "kv")
_DEEPSEEK = (
    _kernel("self_attention.query", "self_attn.q_proj"),
    _kernel("self_attention.wkv_a", "self_attn.kv_a_proj_with_mqa"),
    _norm("self_attention.kv_norm", "self_attn.kv_a_layernorm"),
    ("self_attention.wkv_b.kernel", _KEYS_OF_LATENTS),
    ("self_attention.wkv_b.kernel", _VALUES_OF_LATENTS),
    _kernel("self_attention.out", "self_attn.o_proj"),
    *_LLAMA_NORMS,
    *_mlp("mlp"),
    *_experts("DeepSeekMoeBlock_0.MoeBlock_0", "mlp.experts", "mlp.gate"),
    *_mlp("DeepSeekMoeBlock_0.shared_experts", "mlp.shared_experts"),
)
_LAYERS: dict[str, tuple[tuple[str, str], ...]] = {
    "deepseek": _DEEPSEEK,
    "llama2": (*_LLAMA, *_mlp("mlp")),
    "mixtral": (*_LLAMA, *_experts("MoeBlock_0", "mlp.experts", "mlp.gate")),
    "qwen2": (*_LLAMA, *_mlp("mlp"), *_biases("self_attention")),
    "qwen3": (*_LLAMA, *_mlp("mlp"), *_QK_NORMS),
    "qwen3_moe": (*_LLAMA, *_QK_NORMS, *_experts("moe_block", "mlp.experts", "mlp.gate")),
    **dict.fromkeys(HYBRIDS, _HYBRID),
    "gemma2": _GEMMA2,
    "gemma3": (*_GEMMA2, *_QK_NORMS),
    "gemma4": _GEMMA4,
    "gemma4_small": _GEMMA4,
    "gpt_oss": _GPT_OSS,
    "olmo3": _OLMO3,
}
"""(MaxText's name, the engine's name) of the weights of a layer, by decoder block."""

_TRANSPOSES = {f"{_CONVOLUTION}.kernel": (2, 1, 0)}
_EMBEDDING = "base.token_embedder.embedding"
_PER_LAYER = "base.decoder.per_layer_embedder"
_LAYER_INPUTS = (
    Rule(f"{_PER_LAYER}.embed_tokens_per_layer", "model.embed_tokens_per_layer.weight"),
    Rule(
        f"{_PER_LAYER}.per_layer_model_projection.kernel",
        "model.per_layer_model_projection.weight",
    ),
    Rule(f"{_PER_LAYER}.per_layer_projection_norm.scale", "model.per_layer_projection_norm.weight"),
)


def to_rules(config: Any) -> tuple[Rule, ...]:
    """Rules for the parameters of a `TunixMaxTextAdapter`, one for each weight of each layer."""
    layers = _LAYERS[get(config, "decoder_block")]
    hooks = _hooks(config)
    return (
        *_tables(config),
        Rule("base.decoder.decoder_norm.scale", "model.norm.weight"),
        *(_LAYER_INPUTS if get(config, "decoder_block") == "gemma4_small" else ()),
        *(
            Rule(
                place.name(theirs),
                f"model.layers.{layer}.{ours}",
                _TRANSPOSES.get(theirs),
                hook=hooks.get(ours),
                part=place.part or None,
                part_axis=place.part_axes or 0,
                is_shared=ours == _KEYS_OF_LATENTS,
            )
            for layer, place in enumerate(places(config))
            for theirs, ours in layers
        ),
    )


def _hooks(config: Any) -> dict[str, Callable[[jax.Array], jax.Array]]:
    """What else is done to weights of a layer, by the engine's names."""
    latent = latents(config)
    if latent is not None:
        keys, values = (HeadsHook(latent.nope_dim, is_values) for is_values in (False, True))
        return {_KEYS_OF_LATENTS: keys, _VALUES_OF_LATENTS: values}
    turned = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")
    return dict.fromkeys(turned, halves_of_pairs) if is_interleaved(config) else {}


class HeadsHook(NamedTuple):
    """Takes keys [N, nope, C] or values [N, C, v] out of MaxText's [C, N, nope + v]."""

    nope_dim: int
    is_values: bool

    def __call__(self, x: jax.Array) -> jax.Array:
        """Traced by JAX."""
        if self.is_values:
            return x[..., self.nope_dim :].transpose(1, 0, 2)
        return x[..., : self.nope_dim].transpose(1, 2, 0)


def _tables(config: Any) -> tuple[Rule, ...]:
    embedding = Rule(_EMBEDDING, "model.embed_tokens.weight")
    if not get(config, "logits_via_embedding"):
        return embedding, Rule("base.decoder.logits_dense.kernel", "lm_head.weight", (1, 0))
    if not rounds_head(config):
        return (embedding,)
    head = Rule(_EMBEDDING, "lm_head.weight", hook=round_to_bfloat16)
    return embedding._replace(is_shared=True), head


def round_to_bfloat16(x: jax.Array) -> jax.Array:
    """The nearest values of bfloat16, in the dtype of `x`. XLA may leave out a pair of casts."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def halves_of_pairs(x: jax.Array) -> jax.Array:
    """Reorders the last axis from neighbouring pairs of a rotary embedding to two halves."""
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
