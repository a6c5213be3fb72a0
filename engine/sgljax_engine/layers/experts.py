"""A mixture of experts: each token goes through a few of many gated MLPs (Shazeer et al., 2017).

`route` chooses the experts of each token, and `mix` computes and adds them. Between the two, a
caller may look at the choice, or change the weights. No token is dropped, however many choose the
same expert.

Shape legend of the suffixes: T tokens, E experts, k experts of a token, D model dim, F width of an
expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from sgljax_engine.layers.kernels import Kernels, Weight
from sgljax_engine.layers.target import kv_axes

_LANES = 128
"""Lanes of a TPU's vector register."""

_SIGMOID_FACTOR = 1.702
"""Makes x * sigmoid(factor * x) close to GELU (Hendrycks and Gimpel, 2016)."""


_TINY = 1e-20
"""Is added to a sum of sigmoids, which may be 0."""


class Routing(NamedTuple):
    """The experts of each token, in descending order of the scores that they are chosen by.

    Shape: weights: [T, k] float32, factors of the experts' outputs. ids: [T, k] int32.
    """

    weights: jax.Array
    ids: jax.Array


class Groups(NamedTuple):
    """Equal groups of experts, of which each token takes `num_chosen`.

    A group's score is the sum of its `num_scores` highest ones.
    """

    num_groups: int
    num_chosen: int
    num_scores: int


class Experts(NamedTuple):
    """The weights of a layer's experts.

    Shape: gate, up: [E, D, F]. down: [E, F, D]. Or panels of these. Biases, if there are some:
        gate, up: [E, F]. down: [E, D].
    """

    gate: Weight
    up: Weight
    down: Weight
    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None


def route(
    logits_TE: jax.Array,
    num_chosen: int,
    *,
    is_normalized: bool,
    is_sigmoid: bool = False,
    groups: Groups | None = None,
    choice_bias: jax.Array | None = None,
    scale: float = 1.0,
) -> Routing:
    """Chooses the most probable experts of each token; of equal ones, those of lower index.

    Normalised ones have their probabilities divided by their sum. With groups, experts are of the
    best ones (DeepSeek-V2, 2024). Probabilities may be sigmoids, and a bias [E] float32 be added to
    them for the choice alone (DeepSeek-V3, 2024).
    """
    scores = jax.nn.sigmoid(logits_TE) if is_sigmoid else jax.nn.softmax(logits_TE, axis=-1)
    of_choice = scores if choice_bias is None else scores + choice_bias[None]
    if groups is not None:
        of_choice = jnp.where(_are_in_best_groups(of_choice, groups), of_choice, -jnp.inf)
    weights, ids = lax.top_k(of_choice, num_chosen)
    if choice_bias is not None:
        weights = jnp.take_along_axis(scores, ids, axis=1)
    if is_normalized:
        total = _sum_in_order([weights[:, i : i + 1] for i in range(num_chosen)])
        weights = weights / (total + _TINY if is_sigmoid else total)
    return Routing(weights if scale == 1.0 else weights * scale, ids)


def _are_in_best_groups(scores_TE: jax.Array, groups: Groups) -> jax.Array:
    """Whether each expert [T, E] is in one of the groups that its token chooses."""
    of_experts = scores_TE.reshape(scores_TE.shape[0], groups.num_groups, -1)
    best, _ = lax.top_k(of_experts, groups.num_scores)
    of_groups = _sum_in_order([best[..., i] for i in range(groups.num_scores)])
    _, ids = lax.top_k(of_groups, groups.num_chosen)
    numbers = jnp.arange(groups.num_groups, dtype=ids.dtype)
    are_chosen = jnp.any(ids[..., None] == numbers[None, None], axis=1)
    return jnp.repeat(are_chosen, of_experts.shape[2], axis=1)


def mix(
    x_TD: jax.Array,
    routing: Routing,
    experts: Experts,
    is_used: jax.Array | None,
    kernels: Kernels,
    gated: Callable[[jax.Array, jax.Array], jax.Array],
    expert_parallel_size: int = 1,
) -> jax.Array:
    """The weighted sum [T, D] of each token's experts, added in float32 in the routing's order.

    `gated` makes the input of the last projection of the two others. Over several devices, which
    all have all tokens, each computes its part of its experts, as `expert_axes` says, and the
    results are added. Tokens that are not used ([T] bool) take no expert's time, and get zeros.
    """
    mesh = kernels.mesh
    down_bias, experts = experts.down_bias, experts._replace(down_bias=None)

    def with_bias(mixed: jax.Array) -> jax.Array:
        if down_bias is not None:  # once, whatever part of an expert a device has
            mixed = mixed + _mixed_bias(down_bias, routing, is_used)
        return mixed.astype(x_TD.dtype)

    if mesh is None:
        return with_bias(_mix(x_TD, routing, experts, is_used, kernels, gated))
    num_experts, _, width = experts.gate.shape
    whole, parts = expert_axes(mesh.shape, num_experts, width, expert_parallel_size)

    def on_device(x: jax.Array, routing: Routing, experts: Experts, used: jax.Array) -> jax.Array:
        if whole:
            first = lax.axis_index(whole) * experts.gate.shape[0]
            routing = routing._replace(ids=routing.ids - first)
        return lax.psum(_mix(x, routing, experts, used, kernels, gated), mesh.axis_names)

    widening, narrowing = P(whole, None, parts), P(whole, parts)
    bias = None if experts.gate_bias is None else P(whole, parts)
    specs: Any = Experts(widening, widening, narrowing, bias, bias)  # type: ignore[arg-type]
    used = jnp.ones(x_TD.shape[0], bool) if is_used is None else is_used
    run = jax.shard_map(
        on_device, mesh=mesh, in_specs=(P(), P(), specs, P()), out_specs=P(), check_vma=False
    )
    return with_bias(run(x_TD, routing, experts, used))


def expert_axes(
    axes: Mapping[str, int], num_experts: int, width: int, expert_parallel_size: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tensor axes over which experts are sharded, and those over which their width is.

    `axes` are an engine's, in order, as `placement.submeshes` cuts them: the first ones have as
    many devices together as `expert_parallel_size`. At 1, `shards_width` decides for all axes.
    """
    names = tuple(axes)
    if expert_parallel_size > 1:
        whole = kv_axes(axes, expert_parallel_size)
        return whole, names[len(whole) :]
    by_width = shards_width(num_experts, width, math.prod(axes.values()))
    return ((), names) if by_width else (names, ())


def shards_width(num_experts: int, width: int, num_shards: int) -> bool:
    """Whether devices share out the width of each expert, and not the experts.

    Parts of the width keep all devices equally busy, whichever experts are chosen. But TPU's
    compiler copies all weights whose last axis does not fill its lanes in every step.
    """
    fills_lanes = width % (num_shards * _LANES) == 0
    return fills_lanes or (width % num_shards == 0 and num_experts % num_shards != 0)


def _mix(
    x_TD: jax.Array,
    routing: Routing,
    experts: Experts,
    is_used: jax.Array | None,
    kernels: Kernels,
    gated: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """`mix` in float32 with the experts of one device; ids of others are out of their range."""
    num_tokens, num_chosen = routing.ids.shape
    num_experts = experts.gate.shape[0]
    here = None
    ids = routing.ids
    if is_used is not None:
        here = is_used[:, None] & (ids >= 0) & (ids < num_experts)
        ids = jnp.where(here, ids, num_experts)  # sorted behind all others
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    numbers = jnp.arange(flat.size, dtype=order.dtype)
    places = jnp.zeros_like(order).at[order].set(numbers, unique_indices=True)
    is_of = flat[:, None] == jnp.arange(num_experts, dtype=flat.dtype)[None]
    group_sizes = jnp.sum(is_of, axis=0, dtype=jnp.int32)

    def multiply(weights: Weight, x: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        out = kernels.ragged_linear(weights, x, group_sizes)
        return out if bias is None else out + jnp.take(bias, flat[order], axis=0, mode="clip")

    x = jnp.take(x_TD, order // num_chosen, axis=0, mode="clip")
    gate = multiply(experts.gate, x, experts.gate_bias)
    up = multiply(experts.up, x, experts.up_bias)
    out = multiply(experts.down, gated(gate, up))
    out = jnp.take(out, places, axis=0, mode="clip").astype(jnp.float32)
    out = out.reshape(num_tokens, num_chosen, -1)
    if here is not None:
        out = jnp.where(here[:, :, None], out, 0)  # it may be anything there
    return _sum_in_order([out[:, i] * routing.weights[:, i : i + 1] for i in range(num_chosen)])


def _mixed_bias(bias: jax.Array, routing: Routing, is_used: jax.Array | None) -> jax.Array:
    """The weighted sum [T, D] float32 of the biases [E, D] of each token's experts."""
    weights, ids = routing
    if is_used is not None:
        weights = jnp.where(is_used[:, None], weights, 0)
    bias = bias.astype(jnp.float32)
    terms = (jnp.take(bias, ids[:, i], axis=0, mode="clip") for i in range(ids.shape[1]))
    return _sum_in_order([term * weights[:, i : i + 1] for i, term in enumerate(terms)])


def clamped_swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """gpt-oss' gated unit: (up + 1) * gate * sigmoid(1.702 * gate), of clamped projections."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * (gate * jax.nn.sigmoid(gate * _SIGMOID_FACTOR))


def _sum_in_order(terms: list[jax.Array]) -> jax.Array:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
