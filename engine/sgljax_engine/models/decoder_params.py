"""The parameters of the decoder: their names, shapes, and axes to shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from sgljax_engine.model_config import ModelConfig, MoEConfig
from sgljax_engine.models.delta_net import net_specs
from sgljax_engine.models.latent import latent_specs
from sgljax_engine.models.mixture import mixture_specs
from sgljax_engine.models.spec import KVHeads, ParamAxis, ParamKind, ParamSpec


class DecoderTraits(NamedTuple):
    """Traits of an architecture that its config does not hold.

    Queries and keys are normalised before the rotary embedding (`has_qk_norm`), head by head or all
    heads together (`normalizes_whole_qk`), values without a weight. With `has_post_norms` the
    outputs of attention and MLP are normalised too, before they are added; without `has_pre_norms`
    their inputs are not. Offset norms have weights stored minus one. `scales_embeddings` multiplies
    them by sqrt(hidden_size), a layer scale the layer's output by a number of its own. With
    `has_output_gate` the query projection gives, for each head, its queries and then a gate for
    each channel of the output. Sinks are scores that each query head adds to its softmax.
    `router` is the name of the experts' one.
    """

    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    has_post_norms: bool = False
    has_offset_norms: bool = False
    scales_embeddings: bool = False
    has_value_norm: bool = False
    has_layer_scale: bool = False
    has_output_gate: bool = False
    has_sinks: bool = False
    router: str = "gate"
    normalizes_whole_qk: bool = False
    has_pre_norms: bool = True


def norm_offset(config: ModelConfig, traits: DecoderTraits) -> float:
    given = config.scales.norm_offset
    return (1.0 if traits.has_offset_norms else 0.0) if given is None else given


def param_specs(config: ModelConfig, traits: DecoderTraits) -> dict[str, ParamSpec]:
    """All parameters of a decoder, by Hugging Face's names."""
    specs = _Specs({}, config, traits)
    dim, has_inputs = config.hidden_size, config.per_layer_input_size > 0
    is_tied = config.tie_word_embeddings
    specs.table("model.embed_tokens", dim, ParamKind.HEAD if is_tied else ParamKind.EMBEDDING)
    if has_inputs:
        width = config.num_layers * config.per_layer_input_size
        specs.table("model.embed_tokens_per_layer", width, ParamKind.EMBEDDING)
        specs.project("model.per_layer_model_projection", dim, width)
        specs.norm("model.per_layer_projection_norm", config.per_layer_input_size)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        if traits.has_pre_norms:
            specs.norm(f"{layer}.input_layernorm", dim)
        if config.linear_attention is not None and config.has_state(i):
            specs.found.update(net_specs(f"{layer}.linear_attn.", dim, config.linear_attention))
        elif config.attention.latent is not None:
            specs.found.update(latent_specs(f"{layer}.self_attn", config, config.attention.latent))
        else:
            specs.attention(f"{layer}.self_attn", i)
        specs.norm(f"{layer}.post_attention_layernorm", dim)
        if traits.has_post_norms and traits.has_pre_norms:
            specs.norm(f"{layer}.pre_feedforward_layernorm", dim)
        if traits.has_post_norms:
            specs.norm(f"{layer}.post_feedforward_layernorm", dim)
        if config.moe is None or config.moe.is_beside_mlp or not config.has_experts(i):
            specs.mlp(f"{layer}.mlp", config.mlp_size(i))
        if config.moe is not None and config.has_experts(i):
            specs.experts(layer, config.moe)
        if has_inputs:
            specs.project(f"{layer}.per_layer_input_gate", dim, config.per_layer_input_size)
            specs.project(f"{layer}.per_layer_projection", config.per_layer_input_size, dim)
            specs.norm(f"{layer}.post_per_layer_input_norm", dim)
        if traits.has_layer_scale:
            name = f"{layer}.layer_scalar"
            specs.found[name] = ParamSpec((1,), ParamKind.SCALE, (None,), name)
    specs.norm("model.norm", dim)
    if not is_tied:
        specs.table("lm_head", dim, ParamKind.HEAD)
    return specs.found


class _Specs(NamedTuple):
    """Collects the parameters of a decoder in `found`."""

    found: dict[str, ParamSpec]
    config: ModelConfig
    traits: DecoderTraits

    def project(
        self,
        name: str,
        num_in: int,
        num_out: int,
        axes: tuple[ParamAxis, ParamAxis] = (None, None),
        *,
        has_bias: bool = False,
    ) -> None:
        shape, weight, bias = (num_in, num_out), f"{name}.weight", f"{name}.bias"
        self.found[weight] = ParamSpec(shape, ParamKind.LINEAR, axes, weight)
        if has_bias:
            self.found[bias] = ParamSpec(shape[1:], ParamKind.BIAS, axes[1:], bias)

    def norm(self, name: str, size: int, axis: ParamAxis = None) -> None:
        is_offset = norm_offset(self.config, self.traits) == 1.0
        kind = ParamKind.OFFSET_NORM if is_offset else ParamKind.NORM
        self.found[f"{name}.weight"] = ParamSpec((size,), kind, (axis,), f"{name}.scale")

    def table(self, name: str, width: int, kind: ParamKind) -> None:
        shape, alias = (self.config.vocab_size, width), f"{name}.embedding"
        self.found[f"{name}.weight"] = ParamSpec(shape, kind, ("vocab", None), alias)

    def attention(self, name: str, layer: int) -> None:
        config, kv = self.config, self.config.kv_shape(layer)
        num_out, dim = config.num_heads * kv.head_dim, config.hidden_size
        num_queries = 2 * num_out if self.traits.has_output_gate else num_out
        self.heads(f"{name}.q_proj", num_queries, "heads")
        owns_kv = config.kv_layer(layer) == layer
        if owns_kv:
            axis = KVHeads(kv.num_heads)
            self.heads(f"{name}.k_proj", kv.num_heads * kv.head_dim, axis)
            if not config.values_are_keys(layer):
                self.heads(f"{name}.v_proj", kv.num_heads * kv.head_dim, axis)
        has_bias = config.attention_bias
        self.project(f"{name}.o_proj", num_out, dim, ("heads", None), has_bias=has_bias)
        if self.traits.has_sinks:
            sinks = f"{name}.sinks"
            shape = (config.num_heads,)
            self.found[sinks] = ParamSpec(shape, ParamKind.BIAS, ("heads",), sinks)
        if self.traits.has_qk_norm:
            self.qk_norm(f"{name}.q_norm", kv.head_dim, config.num_heads, "heads")
            if owns_kv:
                self.qk_norm(f"{name}.k_norm", kv.head_dim, kv.num_heads, KVHeads(kv.num_heads))

    def qk_norm(self, name: str, head_dim: int, num_heads: int, axis: ParamAxis) -> None:
        if self.traits.normalizes_whole_qk:
            self.norm(name, num_heads * head_dim, axis)
        else:
            self.norm(name, head_dim)

    def heads(self, name: str, size: int, axis: ParamAxis) -> None:
        has_bias = self.traits.has_qkv_bias or self.config.attention_bias
        self.project(name, self.config.hidden_size, size, (None, axis), has_bias=has_bias)

    def experts(self, layer: str, moe: MoEConfig) -> None:
        dim = self.config.hidden_size
        if not moe.is_beside_mlp:
            router, has_bias = self.traits.router, self.config.mlp_bias
            self.found.update(
                mixture_specs(f"{layer}.mlp.", dim, moe, router, has_shared_bias=has_bias)
            )
            return
        self.found.update(mixture_specs(f"{layer}.", dim, moe, "router.proj"))
        for name, size in (("scale", dim), ("per_expert_scale", moe.num_experts)):
            name = f"{layer}.router.{name}"
            self.found[name] = ParamSpec((size,), ParamKind.SCALE, (None,), name)
        for norm in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2"):
            self.norm(f"{layer}.{norm}", dim)
        self.norm(f"{layer}.pre_feedforward_layernorm_2", dim)

    def mlp(self, name: str, size: int) -> None:
        dim, has_bias = self.config.hidden_size, self.config.mlp_bias
        self.project(f"{name}.gate_proj", dim, size, (None, "mlp"), has_bias=has_bias)
        self.project(f"{name}.up_proj", dim, size, (None, "mlp"), has_bias=has_bias)
        self.project(f"{name}.down_proj", size, dim, ("mlp", None), has_bias=has_bias)
