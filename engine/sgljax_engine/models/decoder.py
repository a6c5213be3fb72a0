"""The decoder shared by all models: grouped-query attention and a gated MLP, with RMS norms.

Where the config has experts, they take the place of the MLP.

Settings in the config are read from it; `DecoderTraits` holds what only the architecture defines. A
model that differs in more than that has its own forward function.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sgljax_engine.attention.base import AttentionOptions
from sgljax_engine.layers.basic import Layout, embed, rms_norm, soft_cap
from sgljax_engine.layers.rope import apply_rope, rope_tables, rope_timescales, stretch_llama3
from sgljax_engine.layers.tiles import Tokens
from sgljax_engine.model_config import ModelConfig, RopeConfig
from sgljax_engine.models.hf import HfConfig
from sgljax_engine.models.mixture import mixture, mixture_specs, router_logits
from sgljax_engine.models.spec import (
    KV_HEADS_AXIS,
    Attend,
    LayerCache,
    ModelContext,
    ModelDefinition,
    ParamKind,
    Params,
    ParamSpec,
)

Rope = tuple[jax.Array, jax.Array]
"""Sines and cosines of each token's rotary angles."""


class DecoderTraits(NamedTuple):
    """Traits of an architecture that its config does not hold.

    Attributes:
        activation: Activation of the MLP's gate.
        has_qkv_bias: Query, key and value projections add a bias.
        has_qk_norm: Queries and keys are normalised, head by head, before the rotary embedding.
        has_post_norms: The outputs of attention and MLP are normalised too, before they are added.
        has_offset_norms: Norm weights are stored minus one.
        scales_embeddings: Embeddings are multiplied by sqrt(hidden_size).
    """

    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    has_post_norms: bool = False
    has_offset_norms: bool = False
    scales_embeddings: bool = False


def decoder(
    traits: DecoderTraits, config_from_hf: Callable[[HfConfig], ModelConfig]
) -> ModelDefinition:
    """An architecture: this decoder with the given traits."""

    def param_specs(config: ModelConfig) -> dict[str, ParamSpec]:
        return _param_specs(config, traits)

    def forward(
        params: Params,
        context: ModelContext,
        input_ids: jax.Array,
        positions: jax.Array,
        attend: Attend,
        kv: tuple[LayerCache, ...] | None,
        tokens: Tokens,
        adapters: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[LayerCache, ...] | None]:
        layers = _Layers(params, context, traits, attend, tokens)
        return layers.forward(input_ids, positions, kv, adapters)

    return ModelDefinition(config_from_hf, param_specs, forward, _logits)


def _param_specs(config: ModelConfig, traits: DecoderTraits) -> dict[str, ParamSpec]:
    dim, mlp = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    norm_kind = ParamKind.OFFSET_NORM if traits.has_offset_norms else ParamKind.NORM
    specs: dict[str, ParamSpec] = {}

    def project(name: str, shape: tuple[int, int], axes: tuple[str | None, str | None]) -> None:
        specs[f"{name}.weight"] = ParamSpec(shape, ParamKind.LINEAR, axes, f"{name}.weight")

    def project_heads(name: str, size: int, axis: str) -> None:
        project(name, (dim, size), (None, axis))
        if traits.has_qkv_bias:
            specs[f"{name}.bias"] = ParamSpec((size,), ParamKind.BIAS, (axis,), f"{name}.bias")

    def norm(name: str, size: int) -> None:
        specs[f"{name}.weight"] = ParamSpec((size,), norm_kind, (None,), f"{name}.scale")

    def table(name: str) -> None:
        shape, axes = (config.vocab_size, dim), ("vocab", None)
        specs[f"{name}.weight"] = ParamSpec(shape, ParamKind.EMBEDDING, axes, f"{name}.embedding")

    table("model.embed_tokens")
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        norm(f"{layer}.input_layernorm", dim)
        project_heads(f"{layer}.self_attn.q_proj", heads, "heads")
        project_heads(f"{layer}.self_attn.k_proj", kv_heads, KV_HEADS_AXIS)
        project_heads(f"{layer}.self_attn.v_proj", kv_heads, KV_HEADS_AXIS)
        project(f"{layer}.self_attn.o_proj", (heads, dim), ("heads", None))
        if traits.has_qk_norm:
            norm(f"{layer}.self_attn.q_norm", config.head_dim)
            norm(f"{layer}.self_attn.k_norm", config.head_dim)
        norm(f"{layer}.post_attention_layernorm", dim)
        if traits.has_post_norms:
            norm(f"{layer}.pre_feedforward_layernorm", dim)
            norm(f"{layer}.post_feedforward_layernorm", dim)
        if config.moe is not None:
            specs |= mixture_specs(f"{layer}.mlp.", dim, config.moe)
        else:
            project(f"{layer}.mlp.gate_proj", (dim, mlp), (None, "mlp"))
            project(f"{layer}.mlp.up_proj", (dim, mlp), (None, "mlp"))
            project(f"{layer}.mlp.down_proj", (mlp, dim), ("mlp", None))
    norm("model.norm", dim)
    if not config.tie_word_embeddings:
        table("lm_head")
    return specs


class _Layers(NamedTuple):
    """A forward pass: the weights, static facts, where keys live, and how tokens are tiled.

    Activations are in the layout of the context; inputs of `attend` are token-major. All layers but
    attention treat each token alone, so `tokens` may tile them.
    """

    params: Params
    context: ModelContext
    traits: DecoderTraits
    attend: Attend
    tokens: Tokens
    adapters: jax.Array | None = None
    is_used: jax.Array | None = None

    def forward(
        self,
        input_ids: jax.Array,
        positions: jax.Array,
        kv: tuple[LayerCache, ...] | None,
        adapters: jax.Array | None,
    ) -> tuple[jax.Array, tuple[LayerCache, ...] | None]:
        config = self.context.config
        attention = config.attention
        # Each distinct rotary embedding is computed once.
        both = (config.rope, attention.sliding_rope or config.rope)
        split_positions = self.tokens.split(positions)
        ropes = {
            rope: self.tokens.map(functools.partial(self.rope_tables, rope), split_positions)
            for rope in dict.fromkeys(both)
        }
        x = self.tokens.map(self.embed, self.tokens.split(input_ids))
        slots = None if adapters is None else self.tokens.split(adapters)
        scale = config.head_dim**-0.5 if attention.scale is None else attention.scale
        new_kv: list[LayerCache] = []
        # Equal layers are traced and lowered once; XLA compiles them as if unrolled.
        layer = jax.jit(self.layer, static_argnames="options")
        for i in range(config.num_layers):
            slides = bool(attention.sliding_layers) and attention.sliding_layers[i]
            window = attention.sliding_window if slides else None
            options = AttentionOptions(scale, window, attention.logit_softcap)
            rope = (attention.sliding_rope if slides else None) or config.rope
            layer_kv = None if kv is None else kv[i]
            weights = self.weights_of(i)
            x, layer_kv = layer(weights, x, ropes[rope], slots, layer_kv, options=options)
            if layer_kv is not None:
                new_kv.append(layer_kv)
        hidden = self.tokens.join(self.tokens.map(self.last_norm, x))
        return hidden, None if kv is None else tuple(new_kv)

    def embed(self, ids: jax.Array) -> jax.Array:
        x = self.layout.place(embed(self.params["model.embed_tokens.weight"], ids))
        if self.traits.scales_embeddings:
            x = x * jnp.asarray(self.context.config.hidden_size**0.5, x.dtype)
        return x

    def last_norm(self, x: jax.Array) -> jax.Array:
        return self.layout.materialize(self.layout.tokens_first(self.norm("model.norm", x)))

    def weights_of(self, index: int) -> Params:
        """A layer's weights, by their names within it."""
        prefix = f"model.layers.{index}."
        return {
            name.removeprefix(prefix): weight
            for name, weight in self.params.items()
            if name.startswith(prefix)
        }

    def layer(
        self,
        weights: Params,
        x: jax.Array,
        rope: Rope,
        adapters: jax.Array | None,
        kv: LayerCache | None,
        options: AttentionOptions,
    ) -> tuple[jax.Array, LayerCache | None]:
        inner, tokens = self._replace(params=weights), self.tokens
        q, k, v = map(tokens.join, tokens.map(inner.before_attention, (x, rope, adapters)))
        out, kv = self.attend(q, k, v, kv, options)
        out = tokens.split(out.reshape(out.shape[0], -1))
        is_used = None if tokens.is_used is None else tokens.split(tokens.is_used)
        return tokens.map(inner.after_attention, (x, out, adapters, is_used)), kv

    def before_attention(
        self, args: tuple[jax.Array, Rope, jax.Array | None]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        x, rope, adapters = args
        inner = self._replace(adapters=adapters)
        return inner.project_qkv("self_attn.", self.norm("input_layernorm", x), *rope)

    def after_attention(
        self, args: tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]
    ) -> jax.Array:
        x, out, adapters, is_used = args
        return self._replace(adapters=adapters, is_used=is_used).project_out(x, out)

    def project_out(self, x: jax.Array, out: jax.Array) -> jax.Array:
        out = self.layout.materialize(self.layout.place(out))
        out = self.linear("self_attn.o_proj", out)
        if not self.traits.has_post_norms:
            x = x + out
            return x + self.mlp("mlp.", self.norm("post_attention_layernorm", x))
        x = x + self.norm("post_attention_layernorm", out)
        out = self.mlp("mlp.", self.norm("pre_feedforward_layernorm", x))
        return x + self.norm("post_feedforward_layernorm", out)

    def project_qkv(
        self, prefix: str, h: jax.Array, sin: jax.Array, cos: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        layout = self.layout

        def project(name: str) -> jax.Array:
            out = self.linear(prefix + name, h)
            if self.traits.has_qkv_bias:
                out = out + layout.per_feature(self.params[f"{prefix}{name}.bias"])
            return layout.split_heads(out, self.context.config.head_dim)

        q, k = project("q_proj"), project("k_proj")
        if self.traits.has_qk_norm:
            q, k = self.norm(prefix + "q_norm", q), self.norm(prefix + "k_norm", k)
        q, k = (apply_rope(x, sin, cos, layout.feature_axis) for x in (q, k))
        v = project("v_proj")
        return layout.tokens_first(q), layout.tokens_first(k), layout.tokens_first(v)

    def mlp(self, prefix: str, h: jax.Array) -> jax.Array:
        if self.context.config.moe is not None:
            change = _adapter_change(self.params, self.context, f"{prefix}gate", h, self.adapters)
            logits = router_logits(self.params[f"{prefix}gate.weight"], h, self.context, change)
            activation = self.traits.activation
            return mixture(self.params, self.context, prefix, h, logits, activation, self.is_used)
        gate, up = self.linear(prefix + "gate_proj", h), self.linear(prefix + "up_proj", h)
        return self.linear(prefix + "down_proj", self.traits.activation(gate) * up)

    def linear(self, name: str, x: jax.Array) -> jax.Array:
        out = self.context.linear(self.params[f"{name}.weight"], x)
        change = _adapter_change(self.params, self.context, name, x, self.adapters)
        return out if change is None else out + change

    def norm(self, name: str, x: jax.Array) -> jax.Array:
        offset = 1.0 if self.traits.has_offset_norms else 0.0
        eps = self.context.config.rms_norm_eps
        weight = self.layout.per_feature(self.params[f"{name}.weight"])
        axis, is_ordered = self.layout.feature_axis, self.context.is_deterministic
        return rms_norm(x, weight, eps, offset, axis, is_ordered=is_ordered)

    def rope_tables(self, rope: RopeConfig, positions: jax.Array) -> Rope:
        timescales = rope_timescales(self.context.config.head_dim, rope.theta)
        if rope.linear_factor != 1.0:
            timescales = timescales * rope.linear_factor
        if rope.llama3 is not None:
            timescales = stretch_llama3(timescales, **dataclasses.asdict(rope.llama3))

        def make(positions: jax.Array) -> Rope:
            sin, cos = rope_tables(positions, timescales)
            return self.layout.place(sin), self.layout.place(cos)

        if self.context.is_deterministic:
            return make(positions)  # a sine computed in another kernel may have other bits
        return self.layout.compute_once(make, positions)

    @property
    def layout(self) -> Layout:
        return self.context.layout


def _adapter_change(
    params: Params, context: ModelContext, name: str, x: jax.Array, adapters: jax.Array | None
) -> jax.Array | None:
    """The term that each token's adapter adds to a projection; None if no adapter changes it.

    A and B hold all slots side by side. A token's product with A is zeroed outside its own slot, so
    that other adapters add zeros and do not affect its sum.
    """
    down = params.get(f"{name}.lora_a")
    if down is None or adapters is None:
        return None
    ranks = context.linear(down, x)
    num_ranks = ranks.shape[context.layout.feature_axis]
    slots = jnp.arange(num_ranks, dtype=jnp.int32) // context.lora_rank
    is_own = context.layout.place(adapters[:, None] == slots)
    ranks = jnp.where(is_own, ranks, jnp.zeros((), ranks.dtype))
    return context.linear(params[f"{name}.lora_b"], ranks)


def _logits(
    params: Params, context: ModelContext, hidden: jax.Array, adapters: jax.Array | None
) -> jax.Array:
    config = context.config
    table = params["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    logits = context.unembed(table, hidden)
    change = _adapter_change(params, context, "lm_head", context.layout.place(hidden), adapters)
    if change is not None:
        logits = logits + context.layout.tokens_first(change).astype(jnp.float32)
    return soft_cap(logits, config.final_logit_softcap)
