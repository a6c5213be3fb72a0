"""The decoder shared by all models: grouped-query attention and a gated MLP, with RMS norms.

Where the config has experts, they take the place of the MLP.

Settings in the config are read from it; `DecoderTraits` holds what only the architecture defines. A
model that differs in more than that has its own forward function.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sgljax_engine.attention.base import AttentionOptions, NewTokens, Prologue
from sgljax_engine.layers.basic import soft_cap, split_heads
from sgljax_engine.layers.rope import (
    keep_fastest,
    rope_timescales,
    stretch_llama3,
    stretch_yarn,
)
from sgljax_engine.model_config import ModelConfig, RopeConfig
from sgljax_engine.models.decoder_params import DecoderTraits, norm_offset, param_specs
from sgljax_engine.models.delta_net import Net
from sgljax_engine.models.hf import HfConfig
from sgljax_engine.models.latent import Latent
from sgljax_engine.models.mixture import CHOICE_BIAS, mixture, router_logits, shared_expert
from sgljax_engine.models.spec import (
    Forward,
    LayerCache,
    ModelContext,
    ModelDefinition,
    Params,
    Pass,
)

Weights = Mapping[str, Any]
"""Weights by name, as the backend's kernels take them."""

Rope = tuple[jax.Array, jax.Array]
"""Sines and cosines of each token's rotary angles."""


_LayerResult = tuple[jax.Array, LayerCache, "jax.Array | None"]
"""Hidden states, the layer's cache, and the experts of each token."""


def decoder(
    traits: DecoderTraits, config_from_hf: Callable[[HfConfig], ModelConfig]
) -> ModelDefinition:
    """An architecture: this decoder with the given traits."""

    def forward(params: Params, context: ModelContext, tokens: Pass) -> Forward:
        weights = context.kernels.weights(params)
        return _Layers(weights, context, traits, tokens).forward()

    specs = functools.partial(param_specs, traits=traits)
    return ModelDefinition(config_from_hf, specs, forward, _logits)


class _LayerKind(NamedTuple):
    """Static facts of a layer beside the shapes of its weights.

    `rope` is the rotary embedding, None for none, with its head_dim. The layer may own no keys and
    values but read another layer's, or have a recurrent state instead of all this; it may have no
    experts where others have.
    """

    options: AttentionOptions
    rope: tuple[RopeConfig | None, int]
    head_dim: int
    owns_kv: bool
    has_state: bool = False
    has_experts: bool = False


class _Layers(NamedTuple):
    """A forward pass: the weights, static facts and tokens; inside a layer, its own weights."""

    params: Weights
    context: ModelContext
    traits: DecoderTraits
    tokens: Pass
    kind: _LayerKind | None = None

    def forward(self) -> Forward:
        config, tokens = self.context.config, self.tokens
        kinds = [self.kind_of(i) for i in range(config.num_layers)]
        # Each distinct rotary embedding is computed once.
        ropes = {
            rope: self.rope_tables(*rope) for rope in dict.fromkeys(kind.rope for kind in kinds)
        }
        fuse = self.context.kernels.fuse
        x = fuse(self.embed)(tokens.input_ids)
        inputs: tuple[jax.Array | None, ...] = (None,) * config.num_layers
        if config.per_layer_input_size:
            inputs = self.layer_inputs(x)

        # Equal layers are traced and lowered once; XLA compiles them as if unrolled.
        @functools.partial(jax.jit, static_argnames="kind")
        def layer(weights: Weights, args: tuple[Any, ...], kind: _LayerKind) -> _LayerResult:
            return fuse(functools.partial(self.layer, kind=kind))(weights, *args)

        owners = (*config.cached_layers, *config.state_layers)
        caches = dict(zip(owners, tokens.caches, strict=True))
        routed: list[jax.Array] = []
        for i, kind in enumerate(kinds):
            source = config.kv_layer(i)
            args = (x, ropes[kind.rope], tokens.adapters, inputs[i], caches[source])
            x, caches[source], experts = layer(self.weights_of(i), args, kind=kind)
            if experts is None and self.context.returns_routed:  # a dense layer beside others
                experts = self.no_experts(x)
            if experts is not None:
                routed.append(experts)
        return Forward(
            fuse(self.last_norm)(x),
            tuple(caches.values()),
            jnp.concatenate(routed, axis=1) if routed else None,
        )

    def kind_of(self, index: int) -> _LayerKind:
        config = self.context.config
        attention, kv = config.attention, config.kv_shape(index)
        slides = attention.slides(index)
        scale = config.head_dim**-0.5 if attention.scale is None else attention.scale
        window = attention.sliding_window if slides else None
        rope = (attention.sliding_rope if slides else None) or config.rope
        rotated_dim = kv.head_dim if attention.latent is None else attention.latent.rope_dim
        return _LayerKind(
            AttentionOptions(scale, window, attention.logit_softcap),
            (rope if attention.rotates(index) else None, rotated_dim),
            kv.head_dim,
            config.kv_layer(index) == index,
            config.has_state(index),
            config.has_experts(index),
        )

    def embed(self, ids: jax.Array) -> jax.Array:
        table = self.params["model.embed_tokens.weight"]
        x = self.context.kernels.embed(table, ids, self.context.dtype)
        factor = self.context.config.scales.embedding
        if factor is None:
            factor = self.context.config.hidden_size**0.5 if self.traits.scales_embeddings else 1.0
        return x if factor == 1.0 else x * jnp.asarray(factor, x.dtype)

    def layer_inputs(self, x: jax.Array) -> tuple[jax.Array, ...]:
        config, size = self.context.config, self.context.config.per_layer_input_size
        table = self.params["model.embed_tokens_per_layer.weight"]
        of_token = self.context.kernels.embed(table, self.tokens.input_ids, self.context.dtype)
        of_token = of_token * jnp.asarray(size**0.5, x.dtype)
        of_state = self.linear("model.per_layer_model_projection", x)
        of_state = of_state * jnp.asarray(config.hidden_size**-0.5, x.dtype)
        of_state = self.norm("model.per_layer_projection_norm", split_heads(of_state, size))
        both = (of_state + split_heads(of_token, size)) * jnp.asarray(2**-0.5, x.dtype)
        return tuple(
            jax.lax.index_in_dim(both, i, 1, keepdims=False) for i in range(config.num_layers)
        )

    def last_norm(self, x: jax.Array) -> jax.Array:
        return self.norm("model.norm", x)

    def weights_of(self, index: int) -> Weights:
        """A layer's weights, by their names within it."""
        prefix = f"model.layers.{index}."
        return {
            name.removeprefix(prefix): weight
            for name, weight in self.params.items()
            if name.startswith(prefix)
        }

    def layer(
        self,
        weights: Weights,
        x: jax.Array,
        rope: Rope,
        adapters: jax.Array | None,
        layer_input: jax.Array | None,
        cache: LayerCache,
        kind: _LayerKind,
    ) -> _LayerResult:
        tokens = self.tokens._replace(adapters=adapters)
        inner = self._replace(params=weights, kind=kind, tokens=tokens)
        h = inner.norm("input_layernorm", x) if self.traits.has_pre_norms else x
        if kind.has_state:
            out, cache = inner.recurrence(h, cache)
            x, experts = inner.add_mlp(x + out)
            return x, cache, experts
        out, cache = inner.attention(h, rope, cache)
        x, experts = inner.project_out(x, out)
        if layer_input is not None:
            x = inner.add_layer_input(x, layer_input)
        x = x * weights["layer_scalar"] if self.traits.has_layer_scale else x
        return x, cache, experts

    def recurrence(self, h: jax.Array, state: LayerCache) -> tuple[jax.Array, LayerCache]:
        """A gated delta net."""
        recur, net = self.tokens.recur, Net(self.params, self.context, self.linear)
        assert recur is not None
        inputs, gates = net.before(h)
        out, state = recur(inputs, net.conv_weight, state)
        return net.after(out, gates), state

    def attention(
        self, h: jax.Array, rope: Rope, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache]:
        kind = self.kind
        assert kind is not None
        gate = None
        if self.context.config.attention.latent is not None:
            latent = Latent(self.params, self.context, self.linear)
            out, cache = self.tokens.attend(latent.before(h, *rope), cache, kind.options)
            return latent.after(out), cache
        if self.context.takes_projections and self.has_plain_heads:
            names = [f"self_attn.{name}_proj" for name in "qkv"]
            q, k, v = (
                split_heads(self.whole_norm(name, x), kind.head_dim)
                for name, x in zip(names, self.linears(names, h), strict=True)
            )
            tokens: jax.Array | NewTokens = NewTokens(q, k, v, self.prologue(*rope))
        else:
            tokens, gate = self.project_qkv("self_attn.", h, *rope)
        if self.traits.has_sinks:
            assert isinstance(tokens, NewTokens)
            sinks = self.params["self_attn.sinks"].astype(jnp.float32)
            tokens = tokens._replace(sinks=sinks)
        out, cache = self.tokens.attend(tokens, cache, kind.options)
        out = out.reshape(out.shape[0], -1)
        return out if gate is None else out * jax.nn.sigmoid(gate), cache

    @property
    def has_plain_heads(self) -> bool:
        """Whether keys are its own, all projections are heads as they are, and all of them turn."""
        assert self.kind is not None
        has_values = "self_attn.v_proj.weight" in self.params
        is_plain = not self.traits.has_value_norm and not self.traits.has_output_gate
        return self.kind.owns_kv and has_values and is_plain and self.rotary_dim is None

    @property
    def rotary_dim(self) -> int | None:
        """The first channels of a head, which alone turn; None if all do, or none does."""
        assert self.kind is not None
        rope, _ = self.kind.rope
        return None if rope is None else rope.rotary_dim

    @property
    def normalizes_heads(self) -> bool:
        """Whether queries and keys are normalised head by head."""
        return self.traits.has_qk_norm and not self.traits.normalizes_whole_qk

    def whole_norm(self, name: str, x: jax.Array) -> jax.Array:
        """The output of a projection, normalised over all heads if there is such a norm."""
        norm = name.replace("_proj", "_norm")
        has_norm = self.traits.normalizes_whole_qk and f"{norm}.weight" in self.params
        return self.norm(norm, x) if has_norm else x

    def prologue(self, sin: jax.Array, cos: jax.Array) -> Prologue:
        if not self.normalizes_heads:
            return Prologue(sin, cos)
        q_norm, eps, offset = self.norm_of("self_attn.q_norm")
        return Prologue(sin, cos, q_norm, self.norm_of("self_attn.k_norm")[0], eps, offset)

    def project_out(self, x: jax.Array, out: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The part of a layer after attention; the experts [T, k] if the context returns them."""
        if not self.traits.has_post_norms:
            return self.add_mlp(self.add_linear(x, "self_attn.o_proj", out))
        out = self.linear("self_attn.o_proj", out)
        x = x + self.norm("post_attention_layernorm", out)
        h = self.norm("pre_feedforward_layernorm", x) if self.traits.has_pre_norms else x
        gated = self.gated("mlp.", h)
        out, experts = self.linear("mlp.down_proj", gated), None
        if self.context.config.moe is not None:
            beside, experts = self.experts_beside(x)
            out = self.norm("post_feedforward_layernorm_1", out)
            out = out + self.norm("post_feedforward_layernorm_2", beside)
        return x + self.norm("post_feedforward_layernorm", out), experts

    def add_mlp(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The last part of a layer without norms behind; returns as `project_out` does."""
        moe, h = self.context.config.moe, self.norm("post_attention_layernorm", x)
        assert self.kind is not None
        if moe is None or not self.kind.has_experts:
            return self.add_linear(x, "mlp.down_proj", self.gated("mlp.", h)), None
        out, experts = self.experts("mlp.", h)
        if moe.shared_size and moe.has_shared_gate:
            gate = jax.nn.sigmoid(self.linear("mlp.shared_expert_gate", h))
            shared = self.gated("mlp.shared_expert.", h)
            out = out + gate * self.linear("mlp.shared_expert.down_proj", shared)
        elif moe.shared_size:
            name = f"mlp.{shared_expert(moe)}."
            out = self.add_linear(out, f"{name}down_proj", self.gated(name, h))
        return x + out, experts

    def add_layer_input(self, x: jax.Array, layer_input: jax.Array) -> jax.Array:
        gate = self.traits.activation(self.linear("per_layer_input_gate", x))
        out = self.linear("per_layer_projection", gate * layer_input)
        return x + self.norm("post_per_layer_input_norm", out)

    def project_qkv(
        self, prefix: str, h: jax.Array, sin: jax.Array, cos: jax.Array
    ) -> tuple[jax.Array | NewTokens, jax.Array | None]:
        """The input of `attend`, and gates [T, N * H] of its output if there are some."""
        kind = self.kind
        assert kind is not None

        def project(name: str) -> jax.Array:
            name = prefix + name
            return split_heads(self.whole_norm(name, self.linear(name, h)), kind.head_dim)

        def rotate(x: jax.Array, name: str) -> jax.Array:
            norm = self.norm_of(prefix + name) if self.normalizes_heads else None
            return self.rotated(x, norm, sin, cos)

        q, gate = project("q_proj"), None
        if self.traits.has_output_gate:  # behind each head
            q, gate = q[:, 0::2], q[:, 1::2].reshape(q.shape[0], -1)
        if not kind.owns_kv:
            return rotate(q, "q_norm"), gate
        k = project("k_proj")
        v = k if f"{prefix}v_proj.weight" not in self.params else project("v_proj")
        if self.traits.has_value_norm:
            v = self.norm(None, v)
        return NewTokens(rotate(q, "q_norm"), rotate(k, "k_norm"), v), gate

    def rotated(
        self,
        x: jax.Array,
        norm: tuple[jax.Array, float, float] | None,
        sin: jax.Array,
        cos: jax.Array,
    ) -> jax.Array:
        """Heads with rotary embedding, after their norm; of their first channels if it is partial.

        Tables of a partial embedding are for those channels.
        """
        kernels, size = self.context.kernels, self.rotary_dim
        if size is None:
            return kernels.rotate(x, norm, sin, cos)
        if norm is not None:
            x = kernels.norm(x, *norm)
        first, rest = jnp.split(x, (size,), axis=-1)
        return jnp.concatenate([kernels.rotate(first, None, sin, cos), rest], axis=-1)

    def experts(self, prefix: str, h: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The output of experts in the MLP's place, and as of `project_out` those of each token."""
        router = f"{prefix}{self.traits.router}"
        change = _adapter_change(self.params, self.context, router, h, self.tokens.adapters)
        logits = router_logits(self.params[f"{router}.weight"], h, self.context, change)
        logits = self.with_bias(router, logits)
        bias = self.params.get(f"{router}.{CHOICE_BIAS}")
        activation, is_used = self.traits.activation, self.tokens.is_used
        params, context = self.params, self.context
        return self.returned(
            mixture(params, context, prefix, h, logits, activation, is_used, choice_bias=bias)
        )

    def gated(self, prefix: str, h: jax.Array) -> jax.Array:
        """The input of an MLP's last projection."""
        names = (f"{prefix}gate_proj", f"{prefix}up_proj")
        fused, weights = self.context.kernels.fused, self.fusable(names)
        has_bias = f"{names[0]}.bias" in self.params
        if fused is None or not fused.joins or has_bias or not fused.serves(weights, h):
            gate, up = (self.linear(name, h) for name in names)
            return self.traits.activation(gate) * up
        return fused.gated(h, weights, self.traits.activation)

    def no_experts(self, x: jax.Array) -> jax.Array:
        """Zeros in the place of a layer's experts."""
        moe = self.context.config.moe
        assert moe is not None
        return jnp.zeros((x.shape[0], moe.num_experts_per_token), moe.id_dtype)

    def returned(self, out: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array | None]:
        moe = self.context.config.moe
        assert moe is not None
        return out[0], out[1].astype(moe.id_dtype) if self.context.returns_routed else None

    def experts_beside(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The experts of a layer that has an MLP too, before their norm (Gemma 4); as `mlp`."""
        params, context = self.params, self.context
        moe, inputs = context.config.moe, self.norm("pre_feedforward_layernorm_2", x)
        assert moe is not None
        routed = self.norm(None, inputs if moe.routes_experts_input else x)
        routed = routed * params["router.scale"][None]
        routed = routed * jnp.asarray(context.config.hidden_size**-0.5, x.dtype)
        change = _adapter_change(params, context, "router.proj", routed, self.tokens.adapters)
        logits = router_logits(params["router.proj.weight"], routed, context, change)
        return self.returned(
            mixture(
                params,
                context,
                "",
                inputs,
                logits,
                self.traits.activation,
                self.tokens.is_used,
                params["router.per_expert_scale"],
            )
        )

    def linear(self, name: str, x: jax.Array) -> jax.Array:
        out = self.context.kernels.linear(self.params[f"{name}.weight"], x)
        change = _adapter_change(self.params, self.context, name, x, self.tokens.adapters)
        return self.with_bias(name, out if change is None else out + change)

    def with_bias(self, name: str, out: jax.Array) -> jax.Array:
        bias = self.params.get(f"{name}.bias")
        return out if bias is None else out + bias[None]

    def linears(self, names: Sequence[str], h: jax.Array) -> Sequence[jax.Array]:
        fused, weights = self.context.kernels.fused, self.fusable(names)
        if fused is None or not fused.joins or not fused.serves(weights, h):
            return [self.linear(name, h) for name in names]
        found = fused.linears(h, weights)
        return [self.with_bias(name, out) for name, out in zip(names, found, strict=True)]

    def add_linear(self, x: jax.Array, name: str, out: jax.Array) -> jax.Array:
        fused, weights = self.context.kernels.fused, self.fusable((name,))
        if fused is None or not fused.adds or not fused.serves(weights, out):
            return x + self.linear(name, out)
        return self.with_bias(name, fused.linear_add(out, weights[0], x))

    def fusable(self, names: Sequence[str]) -> list[Any]:
        """Weights of those names for products without terms of adapters; else None of each."""
        has_adapter = self.tokens.adapters is not None and any(
            f"{name}.lora_a" in self.params for name in names
        )
        if has_adapter:
            return [None for _ in names]
        return [self.params[f"{name}.weight"] for name in names]

    def norm_of(self, name: str) -> tuple[jax.Array, float, float]:
        """Weight, eps and offset of a norm."""
        return self.params[f"{name}.weight"], self.context.config.rms_norm_eps, self.norm_offset

    def norm(self, name: str | None, x: jax.Array) -> jax.Array:
        """The norm of that name; without a name, one without a weight."""
        eps = self.context.config.rms_norm_eps
        weight = None if name is None else self.params[f"{name}.weight"]
        return self.context.kernels.norm(x, weight, eps, self.norm_offset)

    @property
    def norm_offset(self) -> float:
        return norm_offset(self.context.config, self.traits)

    def rope_tables(self, rope: RopeConfig | None, head_dim: int) -> Rope:
        def timescales() -> jax.Array:
            if rope is None:  # all angles are 0, which changes no bit
                return jnp.full(head_dim // 2, jnp.inf)
            found = rope_timescales(rope.rotary_dim or head_dim, rope.theta)
            if rope.linear_factor != 1.0:
                found = found * rope.linear_factor
            if rope.llama3 is not None:
                found = stretch_llama3(found, **dataclasses.asdict(rope.llama3))
            if rope.yarn is not None:
                found = stretch_yarn(found, theta=rope.theta, **dataclasses.asdict(rope.yarn))
            if rope.channel_factors:
                found = found * jnp.asarray(rope.channel_factors, found.dtype)
            if rope.rotary_fraction != 1.0:
                found = keep_fastest(found, rope.rotary_fraction)
            return found

        sin, cos = self.context.kernels.rope_tables(self.tokens.positions, timescales)
        if rope is None or rope.attention_factor == 1.0:
            return sin, cos
        factor = jnp.asarray(rope.attention_factor, sin.dtype)
        return sin * factor, cos * factor


def _adapter_change(
    params: Weights, context: ModelContext, name: str, x: jax.Array, adapters: jax.Array | None
) -> jax.Array | None:
    """The term that each token's adapter adds to a projection; None if no adapter changes it.

    A and B hold all slots side by side. A token's product with A is zeroed outside its own slot, so
    that other adapters add zeros and do not affect its sum.
    """
    down = params.get(f"{name}.lora_a")
    if down is None or adapters is None:
        return None
    ranks = context.kernels.linear(down, x)
    slots = jnp.arange(ranks.shape[1], dtype=jnp.int32) // context.lora_rank
    ranks = jnp.where(adapters[:, None] == slots[None], ranks, jnp.zeros((), ranks.dtype))
    return context.kernels.linear(params[f"{name}.lora_b"], ranks)


def _logits(
    params: Params, context: ModelContext, hidden: jax.Array, adapters: jax.Array | None
) -> jax.Array:
    config = context.config
    name = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    used = {key: x for key, x in params.items() if key.startswith((f"{name}.", "lm_head."))}

    def logits(weights: Weights, hidden: jax.Array) -> jax.Array:
        found = context.kernels.unembed(weights[f"{name}.weight"], hidden)
        change = _adapter_change(weights, context, "lm_head", hidden, adapters)
        if change is not None:
            found = found + change.astype(jnp.float32)
        if config.scales.logits != 1.0:
            found = found * jnp.float32(config.scales.logits)
        return soft_cap(found, config.final_logit_softcap)

    return context.kernels.fuse(logits)(context.kernels.weights(used), hidden)
