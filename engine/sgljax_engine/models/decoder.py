"""The decoder that the dense models share: grouped-query attention and a gated MLP, with RMS norms.

What a config says is read from the config; what only the architecture says is in `DecoderTraits`.
A model that differs in more than that has its own forward function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sgljax_engine.layers.attention import AttentionOptions
from sgljax_engine.layers.basic import Layout, embed, linear, rms_norm, soft_cap, unembed
from sgljax_engine.layers.rope import apply_rope, rope_tables, rope_timescales, stretch_llama3
from sgljax_engine.model_config import ModelConfig, RopeConfig
from sgljax_engine.models.hf import HfConfig
from sgljax_engine.models.spec import (
    Attend,
    LayerCache,
    ModelContext,
    ModelDefinition,
    ParamKind,
    Params,
    ParamSpec,
)


class DecoderTraits(NamedTuple):
    """What an architecture is, whatever its config says.

    Attributes:
        activation: Of the MLP's gate.
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
    """An architecture that is this decoder with some traits."""

    def param_specs(config: ModelConfig) -> dict[str, ParamSpec]:
        return _param_specs(config, traits)

    def forward(
        params: Params,
        context: ModelContext,
        input_ids: jax.Array,
        positions: jax.Array,
        attend: Attend,
        kv: tuple[LayerCache, ...] | None,
    ) -> tuple[jax.Array, tuple[LayerCache, ...] | None]:
        layers = _Layers(params, context, traits, attend)
        return layers.forward(input_ids, positions, kv)

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
        project_heads(f"{layer}.self_attn.k_proj", kv_heads, "kv_heads")
        project_heads(f"{layer}.self_attn.v_proj", kv_heads, "kv_heads")
        project(f"{layer}.self_attn.o_proj", (heads, dim), ("heads", None))
        if traits.has_qk_norm:
            norm(f"{layer}.self_attn.q_norm", config.head_dim)
            norm(f"{layer}.self_attn.k_norm", config.head_dim)
        norm(f"{layer}.post_attention_layernorm", dim)
        if traits.has_post_norms:
            norm(f"{layer}.pre_feedforward_layernorm", dim)
            norm(f"{layer}.post_feedforward_layernorm", dim)
        project(f"{layer}.mlp.gate_proj", (dim, mlp), (None, "mlp"))
        project(f"{layer}.mlp.up_proj", (dim, mlp), (None, "mlp"))
        project(f"{layer}.mlp.down_proj", (mlp, dim), ("mlp", None))
    norm("model.norm", dim)
    if not config.tie_word_embeddings:
        table("lm_head")
    return specs


class _Layers(NamedTuple):
    """A forward pass: the weights, what is static, and where keys live.

    Activations are in the layout of the context; the tokens of what goes to `attend` come first.
    """

    params: Params
    context: ModelContext
    traits: DecoderTraits
    attend: Attend

    def forward(
        self, input_ids: jax.Array, positions: jax.Array, kv: tuple[LayerCache, ...] | None
    ) -> tuple[jax.Array, tuple[LayerCache, ...] | None]:
        config = self.context.config
        attention = config.attention
        # Each distinct rotary embedding is computed once.
        both = (config.rope, attention.sliding_rope or config.rope)
        ropes = {rope: self.rope_tables(rope, positions) for rope in dict.fromkeys(both)}
        x = self.layout.place(embed(self.params["model.embed_tokens.weight"], input_ids))
        if self.traits.scales_embeddings:
            x = x * jnp.asarray(config.hidden_size**0.5, x.dtype)
        scale = config.head_dim**-0.5 if attention.scale is None else attention.scale
        new_kv: list[LayerCache] = []
        # Equal layers are traced and lowered once; XLA compiles them as if they were written out.
        layer = jax.jit(self.layer, static_argnames="options")
        for i in range(config.num_layers):
            slides = bool(attention.sliding_layers) and attention.sliding_layers[i]
            window = attention.sliding_window if slides else None
            options = AttentionOptions(scale, window, attention.logit_softcap)
            rope = (attention.sliding_rope if slides else None) or config.rope
            layer_kv = None if kv is None else kv[i]
            x, layer_kv = layer(self.weights_of(i), x, *ropes[rope], layer_kv, options=options)
            if layer_kv is not None:
                new_kv.append(layer_kv)
        hidden = self.layout.tokens_first(self.norm("model.norm", x))
        return self.layout.materialize(hidden), None if kv is None else tuple(new_kv)

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
        sin: jax.Array,
        cos: jax.Array,
        kv: LayerCache | None,
        options: AttentionOptions,
    ) -> tuple[jax.Array, LayerCache | None]:
        inner = self._replace(params=weights)
        h = inner.norm("input_layernorm", x)
        q, k, v = inner.project_qkv("self_attn.", h, sin, cos)
        out, kv = self.attend(q, k, v, kv, options)
        out = self.layout.materialize(self.layout.place(out.reshape(out.shape[0], -1)))
        out = inner.linear("self_attn.o_proj", out)
        if not self.traits.has_post_norms:
            x = x + out
            h = inner.norm("post_attention_layernorm", x)
            return x + inner.mlp("mlp.", h), kv
        x = x + inner.norm("post_attention_layernorm", out)
        out = inner.mlp("mlp.", inner.norm("pre_feedforward_layernorm", x))
        return x + inner.norm("post_feedforward_layernorm", out), kv

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
        gate, up = self.linear(prefix + "gate_proj", h), self.linear(prefix + "up_proj", h)
        return self.linear(prefix + "down_proj", self.traits.activation(gate) * up)

    def linear(self, name: str, x: jax.Array) -> jax.Array:
        return linear(x, self.params[f"{name}.weight"], self.layout)

    def norm(self, name: str, x: jax.Array) -> jax.Array:
        offset = 1.0 if self.traits.has_offset_norms else 0.0
        eps = self.context.config.rms_norm_eps
        weight = self.layout.per_feature(self.params[f"{name}.weight"])
        return rms_norm(x, weight, eps, offset, self.layout.feature_axis)

    def rope_tables(self, rope: RopeConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        timescales = rope_timescales(self.context.config.head_dim, rope.theta)
        if rope.linear_factor != 1.0:
            timescales = timescales * rope.linear_factor
        if rope.llama3 is not None:
            timescales = stretch_llama3(timescales, **dataclasses.asdict(rope.llama3))
        sin, cos = rope_tables(positions, timescales)
        return self.layout.place(sin), self.layout.place(cos)

    @property
    def layout(self) -> Layout:
        return self.context.layout


def _logits(params: Params, context: ModelContext, hidden: jax.Array) -> jax.Array:
    config = context.config
    table = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return soft_cap(unembed(hidden, params[table]), config.final_logit_softcap)
