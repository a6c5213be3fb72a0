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

from sgljax_engine.attention.base import AttentionOptions, Projections, Prologue
from sgljax_engine.layers.basic import Layout, soft_cap
from sgljax_engine.layers.delta_net import NetInputs
from sgljax_engine.layers.rope import (
    keep_fastest,
    rope_timescales,
    stretch_llama3,
)
from sgljax_engine.layers.tiles import Tokens
from sgljax_engine.model_config import ModelConfig, RopeConfig
from sgljax_engine.models.decoder_params import DecoderTraits, norm_offset, param_specs
from sgljax_engine.models.delta_net import Net
from sgljax_engine.models.hf import HfConfig
from sgljax_engine.models.mixture import mixture, router_logits
from sgljax_engine.models.spec import (
    Attend,
    Forward,
    LayerCache,
    ModelContext,
    ModelDefinition,
    NewKV,
    Params,
    ProjectionAttend,
    Recur,
)

Weights = Mapping[str, Any]
"""Weights by name, as the backend's kernels take them."""

Rope = tuple[jax.Array, jax.Array]
"""Sines and cosines of each token's rotary angles."""


_LayerResult = tuple[jax.Array, "LayerCache | None", "jax.Array | None"]
"""Hidden states, the layer's cache, and the experts of each token."""


def decoder(
    traits: DecoderTraits, config_from_hf: Callable[[HfConfig], ModelConfig]
) -> ModelDefinition:
    """An architecture: this decoder with the given traits."""

    def forward(
        params: Params,
        context: ModelContext,
        input_ids: jax.Array,
        positions: jax.Array,
        attend: Attend,
        kv: tuple[LayerCache, ...] | None,
        tokens: Tokens,
        adapters: jax.Array | None = None,
        recur: Recur | None = None,
    ) -> Forward:
        weights = context.kernels.weights(params)
        layers = _Layers(weights, context, traits, attend, tokens, recur)
        return layers.forward(input_ids, positions, kv, adapters)

    specs = functools.partial(param_specs, traits=traits)
    return ModelDefinition(config_from_hf, specs, forward, _logits)


class _LayerKind(NamedTuple):
    """Static facts of a layer beside the shapes of its weights.

    Attributes:
        options: How it attends.
        rope: Its rotary embedding, and the head_dim of that.
        head_dim: Of its queries and keys.
        owns_kv: False if it reads the keys and values of another layer.
        has_state: Whether it has a recurrent state instead of all this.
    """

    options: AttentionOptions
    rope: tuple[RopeConfig, int]
    head_dim: int
    owns_kv: bool
    has_state: bool = False


class _Layers(NamedTuple):
    """A forward pass: the weights, static facts, where keys live, and how tokens are tiled.

    Activations are in the layout of the context; inputs of `attend` are token-major. All layers but
    attention treat each token alone, so `tokens` may tile them.
    """

    params: Weights
    context: ModelContext
    traits: DecoderTraits
    attend: Attend
    tokens: Tokens
    recur: Recur | None = None
    adapters: jax.Array | None = None
    kind: _LayerKind | None = None
    is_used: jax.Array | None = None

    def forward(
        self,
        input_ids: jax.Array,
        positions: jax.Array,
        kv: tuple[LayerCache, ...] | None,
        adapters: jax.Array | None,
    ) -> Forward:
        config, tokens = self.context.config, self.tokens
        kinds = [self.kind_of(i) for i in range(config.num_layers)]
        # Each distinct rotary embedding is computed once.
        split_positions = tokens.split(positions)
        ropes = {
            rope: tokens.map(functools.partial(self.rope_tables, *rope), split_positions)
            for rope in dict.fromkeys(kind.rope for kind in kinds)
        }
        ids = tokens.split(input_ids)
        fuse = self.context.kernels.fuse
        x = tokens.map(fuse(self.embed), ids)
        slots = None if adapters is None else tokens.split(adapters)
        inputs: tuple[jax.Array | None, ...] = (None,) * config.num_layers
        if config.per_layer_input_size:
            inputs = tokens.map(self.layer_inputs, (ids, x, slots))

        # Equal layers are traced and lowered once; XLA compiles them as if unrolled.
        @functools.partial(jax.jit, static_argnames="kind")
        def layer(weights: Weights, args: tuple[Any, ...], kind: _LayerKind) -> _LayerResult:
            return fuse(functools.partial(self.layer, kind=kind))(weights, *args)

        caches: dict[int, LayerCache | None]
        caches = dict.fromkeys((*config.cached_layers, *config.state_layers))
        if kv is not None:
            caches.update(zip(caches, kv, strict=True))
        routed: list[jax.Array] = []
        for i, kind in enumerate(kinds):
            source = config.kv_layer(i)
            args = (x, ropes[kind.rope], slots, inputs[i], caches[source])
            x, caches[source], experts = layer(self.weights_of(i), args, kind=kind)
            if experts is not None:
                routed.append(tokens.join(experts))
        hidden = tokens.join(tokens.map(fuse(self.last_norm), x))
        return Forward(
            hidden,
            None if kv is None else tuple(cache for cache in caches.values() if cache),
            jnp.concatenate(routed, axis=1) if routed else None,
        )

    def kind_of(self, index: int) -> _LayerKind:
        config = self.context.config
        attention, kv = config.attention, config.kv_shape(index)
        slides = attention.slides(index)
        scale = config.head_dim**-0.5 if attention.scale is None else attention.scale
        window = attention.sliding_window if slides else None
        return _LayerKind(
            AttentionOptions(scale, window, attention.logit_softcap),
            ((attention.sliding_rope if slides else None) or config.rope, kv.head_dim),
            kv.head_dim,
            config.kv_layer(index) == index,
            config.has_state(index),
        )

    def embed(self, ids: jax.Array) -> jax.Array:
        table = self.params["model.embed_tokens.weight"]
        x = self.layout.place(self.context.kernels.embed(table, ids, self.context.dtype))
        factor = self.context.config.scales.embedding
        if factor is None:
            factor = self.context.config.hidden_size**0.5 if self.traits.scales_embeddings else 1.0
        return x if factor == 1.0 else x * jnp.asarray(factor, x.dtype)

    def layer_inputs(
        self, args: tuple[jax.Array, jax.Array, jax.Array | None]
    ) -> tuple[jax.Array, ...]:
        """Each layer's input from the tokens besides hidden states (Gemma 4)."""
        ids, x, adapters = args
        config, size = self.context.config, self.context.config.per_layer_input_size
        inner = self._replace(adapters=adapters)
        table = self.params["model.embed_tokens_per_layer.weight"]
        found = self.context.kernels.embed(table, ids, self.context.dtype)
        of_token = self.layout.place(found)
        of_token = of_token * jnp.asarray(size**0.5, x.dtype)
        of_state = inner.linear("model.per_layer_model_projection", x)
        of_state = of_state * jnp.asarray(config.hidden_size**-0.5, x.dtype)
        of_state = self.norm(
            "model.per_layer_projection_norm", self.layout.split_heads(of_state, size)
        )
        both = of_state + self.layout.split_heads(of_token, size)
        both = both * jnp.asarray(2**-0.5, x.dtype)
        axis = self.layout.head_axis
        return tuple(
            jax.lax.index_in_dim(both, i, axis, keepdims=False) for i in range(config.num_layers)
        )

    def last_norm(self, x: jax.Array) -> jax.Array:
        return self.layout.materialize(self.layout.tokens_first(self.norm("model.norm", x)))

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
        kv: LayerCache | None,
        kind: _LayerKind,
    ) -> tuple[jax.Array, LayerCache | None, jax.Array | None]:
        inner, tokens = self._replace(params=weights, kind=kind), self.tokens
        gate = None
        if kind.has_state:
            return inner.recurrent_layer(x, adapters, kv)
        if isinstance(self.attend, ProjectionAttend) and inner.has_plain_heads:
            q, k, v = map(tokens.join, tokens.map(inner.projections, (x, adapters)))
            new = Projections(q, k, v, inner.prologue(*map(tokens.join, rope)))
            out, kv = self.attend.from_projections(new, kv, kind.options)
        else:
            q, new, gate = tokens.map(inner.before_attention, (x, rope, adapters))
            q, new = jax.tree.map(tokens.join, (q, new))
            out, kv = self.attend(q, new, kv, kind.options)
        out = tokens.split(out.reshape(out.shape[0], -1))
        args = (x, out, gate, adapters, layer_input, self.split_is_used)
        x, experts = tokens.map(inner.after_attention, args)
        return x, kv, experts

    @property
    def split_is_used(self) -> jax.Array | None:
        is_used = self.tokens.is_used
        return None if is_used is None else self.tokens.split(is_used)

    @property
    def has_plain_heads(self) -> bool:
        """Whether keys are its own, all projections are heads as they are, and all of them turn."""
        assert self.kind is not None
        has_values = "self_attn.v_proj.weight" in self.params
        is_plain = not self.traits.has_value_norm and not self.traits.has_output_gate
        turns = self.kind.rope[0].rotary_dim is None
        return self.kind.owns_kv and has_values and is_plain and turns

    def recurrent_layer(
        self, x: jax.Array, adapters: jax.Array | None, state: LayerCache | None
    ) -> _LayerResult:
        """A layer with a gated delta net."""
        tokens, recur = self.tokens, self.recur
        assert recur is not None
        inputs, gates = tokens.map(self.before_recurrence, (x, adapters))
        weight = self.net().conv_weight
        out, state = recur(jax.tree.map(tokens.join, inputs), weight, state)
        args = (x, tokens.split(out), gates, adapters, self.split_is_used)
        x, experts = tokens.map(self.after_recurrence, args)
        return x, state, experts

    def net(self) -> Net:
        return Net(self.params, self.context, self.linear)

    def before_recurrence(
        self, args: tuple[jax.Array, jax.Array | None]
    ) -> tuple[NetInputs, jax.Array]:
        x, adapters = args
        return self._replace(adapters=adapters).net().before(self.norm("input_layernorm", x))

    def after_recurrence(
        self,
        args: tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None],
    ) -> tuple[jax.Array, jax.Array | None]:
        x, out, gates, adapters, is_used = args
        inner = self._replace(adapters=adapters, is_used=is_used)
        return inner.add_mlp(x + inner.net().after(out, gates))

    def projections(
        self, args: tuple[jax.Array, jax.Array | None]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values before the prologue; tokens first."""
        assert self.kind is not None
        x, adapters = args
        names = [f"self_attn.{name}_proj" for name in "qkv"]
        inner = self._replace(adapters=adapters)
        found = inner.linears(names, self.norm("input_layernorm", x))
        q, k, v = (self.layout.split_heads(each, self.kind.head_dim) for each in found)
        return q, k, v

    def prologue(self, sin: jax.Array, cos: jax.Array) -> Prologue:
        if not self.traits.has_qk_norm:
            return Prologue(sin, cos)
        q_norm, eps, offset = self.norm_of("self_attn.q_norm")
        return Prologue(sin, cos, q_norm, self.norm_of("self_attn.k_norm")[0], eps, offset)

    def before_attention(
        self, args: tuple[jax.Array, Rope, jax.Array | None]
    ) -> tuple[jax.Array, NewKV | None, jax.Array | None]:
        """Queries, keys and values, and gates of the output if there are some."""
        x, rope, adapters = args
        inner = self._replace(adapters=adapters)
        return inner.project_qkv("self_attn.", self.norm("input_layernorm", x), *rope)

    def after_attention(
        self,
        args: tuple[
            jax.Array,
            jax.Array,
            jax.Array | None,
            jax.Array | None,
            jax.Array | None,
            jax.Array | None,
        ],
    ) -> tuple[jax.Array, jax.Array | None]:
        """Hidden states, and the experts of each token if the context returns them."""
        x, out, gate, adapters, layer_input, is_used = args
        inner = self._replace(adapters=adapters, is_used=is_used)
        if gate is not None:
            out = out * jax.nn.sigmoid(gate)
        x, experts = inner.project_out(x, out)
        if layer_input is not None:
            x = inner.add_layer_input(x, layer_input)
        return x * self.params["layer_scalar"] if self.traits.has_layer_scale else x, experts

    def project_out(self, x: jax.Array, out: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The part of a layer after attention; the experts [T, k] if the context returns them."""
        out = self.layout.materialize(self.layout.place(out))
        if not self.traits.has_post_norms:
            return self.add_mlp(self.add_linear(x, "self_attn.o_proj", out))
        out = self.linear("self_attn.o_proj", out)
        x = x + self.norm("post_attention_layernorm", out)
        gated = self.gated("mlp.", self.norm("pre_feedforward_layernorm", x))
        out, experts = self.linear("mlp.down_proj", gated), None
        if self.context.config.moe is not None:
            beside, experts = self.experts_beside(x)
            out = self.norm("post_feedforward_layernorm_1", out)
            out = out + self.norm("post_feedforward_layernorm_2", beside)
        return x + self.norm("post_feedforward_layernorm", out), experts

    def add_mlp(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The last part of a layer without norms behind; returns as `project_out` does."""
        moe, h = self.context.config.moe, self.norm("post_attention_layernorm", x)
        if moe is None:
            return self.add_linear(x, "mlp.down_proj", self.gated("mlp.", h)), None
        out, experts = self.experts("mlp.", h)
        if moe.shared_size:
            gate = jax.nn.sigmoid(self.linear("mlp.shared_expert_gate", h))
            shared = self.gated("mlp.shared_expert.", h)
            out = out + gate * self.linear("mlp.shared_expert.down_proj", shared)
        return x + out, experts

    def add_layer_input(self, x: jax.Array, layer_input: jax.Array) -> jax.Array:
        gate = self.traits.activation(self.linear("per_layer_input_gate", x))
        out = self.linear("per_layer_projection", gate * layer_input)
        return x + self.norm("post_per_layer_input_norm", out)

    def project_qkv(
        self, prefix: str, h: jax.Array, sin: jax.Array, cos: jax.Array
    ) -> tuple[jax.Array, NewKV | None, jax.Array | None]:
        layout, kind = self.layout, self.kind
        assert kind is not None

        def project(name: str) -> jax.Array:
            return layout.split_heads(self.linear(prefix + name, h), kind.head_dim)

        def rotate(x: jax.Array, name: str) -> jax.Array:
            norm = self.norm_of(prefix + name) if self.traits.has_qk_norm else None
            return layout.tokens_first(self.rotated(x, norm, sin, cos))

        q, gate = project("q_proj"), None
        if self.traits.has_output_gate:
            q, gate = self.without_gates(q)
        if not kind.owns_kv:
            return rotate(q, "q_norm"), None, gate
        k = project("k_proj")
        v = k if f"{prefix}v_proj.weight" not in self.params else project("v_proj")
        if self.traits.has_value_norm:
            v = self.norm(None, v)
        return rotate(q, "q_norm"), (rotate(k, "k_norm"), layout.tokens_first(v)), gate

    def without_gates(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Queries of a projection that holds a gate behind each, and the gates [T, N * H]."""
        layout = self.layout
        x = layout.tokens_first(x)
        queries, gates = x[:, 0::2], x[:, 1::2]
        gates = gates.reshape(gates.shape[0], -1)
        return layout.materialize(layout.place(queries)), gates

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
        assert self.kind is not None
        kernels, options = self.context.kernels, self.context.options
        size, axis = self.kind.rope[0].rotary_dim, self.layout.feature_axis
        if size is None:
            return kernels.rotate(x, norm, sin, cos, options)
        if norm is not None:
            x = kernels.norm(x, *norm, options)
        first, rest = jnp.split(x, (size,), axis=axis)
        return jnp.concatenate([kernels.rotate(first, None, sin, cos, options), rest], axis=axis)

    def experts(self, prefix: str, h: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The output of experts in the MLP's place, and as of `project_out` those of each token."""
        change = _adapter_change(self.params, self.context, f"{prefix}gate", h, self.adapters)
        logits = router_logits(self.params[f"{prefix}gate.weight"], h, self.context, change)
        activation = self.traits.activation
        return self.returned(
            mixture(self.params, self.context, prefix, h, logits, activation, self.is_used)
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

    def returned(self, out: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array | None]:
        """The output of `mixture`, with the experts only if the context returns them."""
        moe = self.context.config.moe
        assert moe is not None
        return out[0], out[1].astype(moe.id_dtype) if self.context.returns_routed else None

    def experts_beside(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The experts of a layer that has an MLP too, before their norm (Gemma 4); as `mlp`."""
        params, context, layout = self.params, self.context, self.layout
        moe, inputs = context.config.moe, self.norm("pre_feedforward_layernorm_2", x)
        assert moe is not None
        routed = self.norm(None, inputs if moe.routes_experts_input else x)
        routed = routed * layout.per_feature(params["router.scale"])
        routed = routed * jnp.asarray(context.config.hidden_size**-0.5, x.dtype)
        change = _adapter_change(params, context, "router.proj", routed, self.adapters)
        logits = router_logits(params["router.proj.weight"], routed, context, change)
        return self.returned(
            mixture(
                params,
                context,
                "",
                inputs,
                logits,
                self.traits.activation,
                self.is_used,
                params["router.per_expert_scale"],
            )
        )

    def linear(self, name: str, x: jax.Array) -> jax.Array:
        out = self.context.linear(self.params[f"{name}.weight"], x)
        change = _adapter_change(self.params, self.context, name, x, self.adapters)
        return self.with_bias(name, out if change is None else out + change)

    def with_bias(self, name: str, out: jax.Array) -> jax.Array:
        bias = self.params.get(f"{name}.bias")
        return out if bias is None else out + self.layout.per_feature(bias)

    def linears(self, names: Sequence[str], h: jax.Array) -> Sequence[jax.Array]:
        fused, weights = self.context.kernels.fused, self.fusable(names)
        if fused is None or not fused.joins or not fused.serves(weights, h):
            return [self.linear(name, h) for name in names]
        found = fused.linears(h, weights)
        return [self.with_bias(name, out) for name, out in zip(names, found, strict=True)]

    def add_linear(self, x: jax.Array, name: str, out: jax.Array) -> jax.Array:
        """`x` and a projection."""
        fused, weights = self.context.kernels.fused, self.fusable((name,))
        if fused is None or not fused.adds or not fused.serves(weights, out):
            return x + self.linear(name, out)
        return self.with_bias(name, fused.linear_add(out, weights[0], x))

    def fusable(self, names: Sequence[str]) -> list[Any]:
        """Weights of those names for products that have no terms of adapters.

        None of each where there are some, and where bits must not depend on the batch.
        """
        has_adapter = self.adapters is not None and any(
            f"{name}.lora_a" in self.params for name in names
        )
        if has_adapter or self.context.is_tiled:
            return [None for _ in names]
        return [self.params[f"{name}.weight"] for name in names]

    def norm_of(self, name: str) -> tuple[jax.Array, float, float]:
        """Weight, eps and offset of a norm."""
        return self.params[f"{name}.weight"], self.context.config.rms_norm_eps, self.norm_offset

    def norm(self, name: str | None, x: jax.Array) -> jax.Array:
        """The norm of that name; without a name, one without a weight."""
        eps = self.context.config.rms_norm_eps
        weight = None if name is None else self.params[f"{name}.weight"]
        return self.context.kernels.norm(x, weight, eps, self.norm_offset, self.context.options)

    @property
    def norm_offset(self) -> float:
        """What is added to the weights of norms."""
        return norm_offset(self.context.config, self.traits)

    def rope_tables(self, rope: RopeConfig, head_dim: int, positions: jax.Array) -> Rope:
        def timescales() -> jax.Array:
            found = rope_timescales(rope.rotary_dim or head_dim, rope.theta)
            if rope.linear_factor != 1.0:
                found = found * rope.linear_factor
            if rope.llama3 is not None:
                found = stretch_llama3(found, **dataclasses.asdict(rope.llama3))
            if rope.rotary_fraction != 1.0:
                found = keep_fastest(found, rope.rotary_fraction)
            return found

        return self.context.kernels.rope_tables(positions, timescales, self.context.options)

    @property
    def layout(self) -> Layout:
        return self.context.layout


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
    name = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    used = {key: x for key, x in params.items() if key.startswith((f"{name}.", "lm_head."))}

    def logits(weights: Weights, hidden: jax.Array) -> jax.Array:
        found = context.kernels.unembed(weights[f"{name}.weight"], hidden)
        placed = context.layout.place(hidden)
        change = _adapter_change(weights, context, "lm_head", placed, adapters)
        if change is not None:
            found = found + context.layout.tokens_first(change).astype(jnp.float32)
        if config.scales.logits != 1.0:
            found = found * jnp.float32(config.scales.logits)
        return soft_cap(found, config.final_logit_softcap)

    return context.kernels.fuse(logits)(context.kernels.weights(used), hidden)
