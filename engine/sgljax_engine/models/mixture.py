"""The experts of a decoder layer, and the router that chooses among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from sgljax_engine.layers.experts import Experts, Groups, clamped_swiglu, mix, route
from sgljax_engine.layers.kernels import Weight
from sgljax_engine.model_config import MoEConfig
from sgljax_engine.models.spec import EXPERTS_AXIS, ModelContext, ParamKind, ParamSpec

CHOICE_BIAS = "e_score_correction_bias"
"""Name of the bias of a router's choice."""

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Projections of an expert, by Hugging Face's names."""


def mixture_specs(
    prefix: str,
    hidden_size: int,
    moe: MoEConfig,
    router: str = "gate",
    *,
    has_shared_bias: bool = False,
) -> dict[str, ParamSpec]:
    """The parameters of a layer's router and experts; biases are of what all tokens go through."""
    router = f"{prefix}{router}.weight"
    specs = {
        router: ParamSpec((hidden_size, moe.num_experts), ParamKind.LINEAR, (None, None), router)
    }
    widening = (moe.num_experts, hidden_size, moe.intermediate_size)
    narrowing = (moe.num_experts, moe.intermediate_size, hidden_size)
    for projection in PROJECTIONS:
        name = f"{prefix}experts.{projection}.weight"
        if projection == "down_proj":
            shape, axes = narrowing, (EXPERTS_AXIS, "mlp", None)
        else:
            shape, axes = widening, (EXPERTS_AXIS, None, "mlp")
        specs[name] = ParamSpec(shape, ParamKind.EXPERTS, axes, name)
    if moe.has_bias:
        specs |= _bias_specs(prefix, router, hidden_size, moe)
    if moe.shared_size:
        shared = _shared_specs(f"{prefix}{shared_expert(moe)}", hidden_size, moe)
        specs |= shared
        if has_shared_bias:
            specs |= dict(map(_bias_of, shared.values()))
    if moe.router.has_choice_bias:
        name = f"{router.removesuffix('.weight')}.{CHOICE_BIAS}"
        specs[name] = ParamSpec((moe.num_experts,), ParamKind.ROUTER_BIAS, (None,), name)
    return specs


def _bias_of(weight: ParamSpec) -> tuple[str, ParamSpec]:
    name = f"{weight.alias.removesuffix('.weight')}.bias"
    return name, ParamSpec(weight.shape[1:], ParamKind.BIAS, weight.axes[1:], name)


def shared_expert(moe: MoEConfig) -> str:
    """Name of the expert that every token goes through; in plural if files may join several."""
    return "shared_expert" if moe.has_shared_gate else "shared_experts"


def _bias_specs(prefix: str, router: str, hidden_size: int, moe: MoEConfig) -> dict[str, ParamSpec]:
    """Biases of the router and the experts; the last is added to sums, which no device shards."""
    name = f"{router.removesuffix('.weight')}.bias"
    specs = {name: ParamSpec((moe.num_experts,), ParamKind.BIAS, (None,), name)}
    for projection in PROJECTIONS:
        name, axes = f"{prefix}experts.{projection}.bias", (EXPERTS_AXIS, "mlp")
        size = moe.intermediate_size
        if projection == "down_proj":
            size, axes = hidden_size, (None, None)
        specs[name] = ParamSpec((moe.num_experts, size), ParamKind.BIAS, axes, name)
    return specs


def _shared_specs(name: str, hidden_size: int, moe: MoEConfig) -> dict[str, ParamSpec]:
    size = moe.shared_size
    shapes: dict[str, tuple[tuple[int, int], tuple[str | None, str | None]]] = {
        f"{name}.gate_proj.weight": ((hidden_size, size), (None, "mlp")),
        f"{name}.up_proj.weight": ((hidden_size, size), (None, "mlp")),
        f"{name}.down_proj.weight": ((size, hidden_size), ("mlp", None)),
    }
    if moe.has_shared_gate:
        shapes[f"{name}_gate.weight"] = ((hidden_size, 1), (None, None))
    return {
        name: ParamSpec(shape, ParamKind.LINEAR, axes, name)
        for name, (shape, axes) in shapes.items()
    }


def mixture(
    params: Mapping[str, Any],
    context: ModelContext,
    prefix: str,
    x: jax.Array,
    logits: jax.Array,
    activation: Callable[[jax.Array], jax.Array],
    is_used: jax.Array | None,
    scales: jax.Array | None = None,
    choice_bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The sum [T, D] of each token's experts, and their ids as in `Routing.ids`.

    They are chosen by the router's logits [T, E] float32, see `layers.experts.route`. Tokens that
    are not used ([T] bool) take no expert's time, and get zeros. `scales` [E] are factors of the
    experts' outputs.
    """
    moe = context.config.moe
    assert moe is not None
    router, groups = moe.router, None
    if router.num_groups > 1:
        groups = Groups(router.num_groups, router.num_chosen_groups, router.num_group_scores)
    routing = route(
        logits,
        moe.num_experts_per_token,
        is_normalized=moe.norm_topk_prob,
        is_sigmoid=router.is_sigmoid,
        groups=groups,
        choice_bias=choice_bias,
        scale=router.scale,
    )
    if scales is not None:
        weights = routing.weights * scales.astype(jnp.float32)[routing.ids]
        routing = routing._replace(weights=weights)
    experts = Experts(
        *(params[f"{prefix}experts.{name}.weight"] for name in PROJECTIONS),
        *(params.get(f"{prefix}experts.{name}.bias") for name in PROJECTIONS),
    )
    limit = moe.swiglu_limit

    def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
        return activation(gate) * up if limit is None else clamped_swiglu(gate, up, limit)

    size = context.expert_parallel_size
    mixed = mix(x, routing, experts, is_used, context.kernels, gated, size)
    return mixed, routing.ids


def router_logits(
    weight: Weight, x: jax.Array, context: ModelContext, change: jax.Array | None = None
) -> jax.Array:
    """A router's logits [T, E] float32 for x [T, D] and a weight [D, E].

    Computed in float32 whatever the model's dtype, since a rounded logit may choose another expert.
    `change` [T, E] is the term of each token's adapter.
    """
    with jax.default_matmul_precision("highest"):
        logits = context.kernels.linear(weight.astype(jnp.float32), x.astype(jnp.float32))
    return logits if change is None else logits + change.astype(jnp.float32)
