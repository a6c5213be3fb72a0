"""LoRA adapters kept apart from the weights: slots of A and B beside each projection.

For each projection that adapters may change, the engine has arrays with a fixed number of slots,
side by side: A [in, slots x rank] and B [slots x rank, out]. Loading an adapter writes its slot,
with zeros beyond its rank, so that shapes never change and nothing is recompiled.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sgljax_engine.errors import WeightSyncError
from sgljax_engine.weights.finite import is_finite, refuse_not_finite
from sgljax_engine.weights.lora import ArraySpec, LoraTerm, lora_term
from sgljax_engine.weights.moves import move
from sgljax_engine.weights.rules import (
    LoraRule,
    Match,
    Rule,
    RuleTable,
    WeightRule,
    flatten_named,
    indices_by_axis,
)
from sgljax_engine.weights.specs import TargetSpec, Weights, source_spec

A_SUFFIX, B_SUFFIX = ".lora_a", ".lora_b"
"""Suffixes of a projection's name, for its slots among the engine's weights."""


class AdapterSlots(NamedTuple):
    """The adapter slots of an engine, by the projection's name without ".weight". Hashable."""

    max_loras: int
    max_rank: int
    targets: tuple[tuple[str, TargetSpec, TargetSpec], ...]

    def specs(self) -> dict[str, TargetSpec]:
        return {
            f"{name}{suffix}": spec
            for name, *both in self.targets
            for suffix, spec in zip((A_SUFFIX, B_SUFFIX), both, strict=True)
        }


class _Step(NamedTuple):
    """How to make the factors of one projection from a pair.

    `parts` are A or B, an axis of it, and the index that is taken there; in this order. `a_axes`
    and `b_axes` are the axes of A and B in the projection's order, without the rank. B is
    multiplied by `scale`.
    """

    name: str
    a: str
    b: str
    parts: tuple[tuple[str, int, int], ...]
    a_axes: tuple[int, ...]
    b_axes: tuple[int, ...]
    scale: float


class AdapterPlan(NamedTuple):
    """A checked plan from a source's pairs to a slot.

    `load` takes serving A and B by name, sources and slot, and gives A and B with the adapter in
    its slot, and for each step whether its factors are finite.
    """

    steps: tuple[_Step, ...]
    slots: AdapterSlots
    load: Callable[[Weights, list[tuple[Any, Any]], Any], tuple[Weights, jax.Array]]

    def build(
        self,
        source: Mapping[str, Any],
        serving: Weights,
        slot: int,
        *,
        check_finite: bool = True,
    ) -> Weights:
        """Makes the engine's A and B with the adapter in a slot; waits for them. Engine thread.

        The serving ones stay unchanged. Raises WeightSyncError when that fails, or factors are not
        finite.
        """
        pairs = [(source[step.a], source[step.b]) for step in self.steps]
        try:
            pairs = _beside(pairs, next(iter(serving.values())))
            beside = {} if self.slots.max_loras == 1 else serving  # one slot is all there is
            made, flags = jax.block_until_ready(self.load(beside, pairs, np.int32(slot)))
            names = [f"{step.name} (LoRA)" for step in self.steps]
            refuse_not_finite(names, flags if check_finite else None)
            return made
        except WeightSyncError:
            raise
        except Exception as error:
            raise WeightSyncError(f"loading the adapter failed: {error}") from error


def _beside(pairs: list[tuple[Any, Any]], serving: jax.Array) -> list[tuple[Any, Any]]:
    """Moves pairs to the engine's devices; JAX is slow to find that many arrays need no move."""
    devices, kind = serving.devices(), serving.sharding.memory_kind
    if len(devices) == 1 and all(
        isinstance(x, jax.Array) and x.devices() == devices and x.sharding.memory_kind == kind
        for pair in pairs
        for x in pair
    ):
        return pairs
    assert isinstance(serving.sharding, jax.sharding.NamedSharding)
    everywhere = jax.sharding.NamedSharding(
        serving.sharding.mesh, jax.sharding.PartitionSpec(), memory_kind=kind
    )

    def spread(x: Any) -> Any:
        is_spread = isinstance(x, jax.Array) and len(x.devices()) > 1
        return move(x, everywhere) if is_spread else x

    return jax.device_put(jax.tree.map(spread, pairs), everywhere)


def slots_of(weights: Mapping[str, Any]) -> dict[str, Any]:
    """The adapter slots among an engine's weights."""
    return {name: x for name, x in weights.items() if name.endswith((A_SUFFIX, B_SUFFIX))}


def empty_slots(slots: AdapterSlots) -> Weights:
    shapes = slot_shapes(slots)

    def zeros() -> Weights:
        return {name: jnp.zeros(x.shape, x.dtype) for name, x in shapes.items()}

    shardings = {name: x.sharding for name, x in shapes.items()}
    return jax.jit(zeros, out_shardings=shardings)()


def slot_shapes(slots: AdapterSlots) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: spec.stored for name, spec in slots.specs().items()}


# ------------------------------------------------------------------ plans


def plan_adapter(
    tree: Any,
    rules: Sequence[WeightRule],
    slots: AdapterSlots,
    targets: Mapping[str, TargetSpec],
) -> tuple[AdapterPlan, dict[str, Any]]:
    """The plan for a pytree with an adapter's pairs, and the pytree's arrays by name.

    The pytree holds A and B of each LoRA rule, and what a rule ignores on purpose. Raises
    WeightSyncError that names each pair that is incomplete, does not fit, has too large a rank, or
    changes a weight without a slot; and each leaf that is of no pair.
    """
    source = flatten_named(tree)
    pairs = tuple(rule for rule in rules if isinstance(rule, LoraRule))
    mapping = tuple(rule for rule in rules if isinstance(rule, Rule))
    named = {name: source[name] for rule in pairs for name in (rule.a, rule.b) if name in source}
    ignores = RuleTable(mapping).ignores
    others = tuple(name for name in source if name not in named and not ignores(name))
    spec = source_spec(named)
    key = (tuple(spec.items()), others, pairs, mapping, slots)
    return _plan(*key, tuple(targets.items())), named


@functools.lru_cache(maxsize=16)
def _plan(
    spec: tuple[tuple[str, ArraySpec], ...],
    others: tuple[str, ...],
    pairs: tuple[LoraRule, ...],
    mapping: tuple[Rule, ...],
    slots: AdapterSlots,
    targets: tuple[tuple[str, TargetSpec], ...],
) -> AdapterPlan:
    source = dict(spec)
    shapes = {name: target.shape for name, target in targets}
    names = {target.alias: name for name, target in targets} | {name: name for name, _ in targets}
    with_slots = {name for name, *_ in slots.targets}
    table = RuleTable(mapping)
    steps: dict[str, _Step] = {}
    problems: list[str] = [] if pairs else ["there is no LoRA rule"]
    problems += [
        f"{name!r} is of no LoRA pair that a rule names: an adapter is its pairs, without "
        "magnitudes, biases or whole weights; update_weights takes them all, merged"
        for name in others
    ]
    for rule in pairs:
        term, found = lora_term(rule, source)
        problems += found
        if term is None:
            continue
        rank = source[rule.a].shape[-1]
        if rank > slots.max_rank:
            problems.append(
                f"{rule.a!r} has rank {rank}, but max_lora_rank of the engine is {slots.max_rank}"
            )
            continue
        shape = weight_shape(term, source)
        matches = table.match(rule.weight, shape)
        if not matches:
            problems.append(f"{rule.weight!r} has a LoRA pair but is mapped by no rule")
        for each in matches:
            target = names.get(each.target or "")
            projection = (target or "").removesuffix(".weight")
            if target is None or projection not in with_slots:
                problems.append(
                    f"{rule.weight!r} maps to {each.target!r}, which has no adapter slots; "
                    f"max_loras gives them to {_kinds(with_slots)}"
                )
                continue
            step = _plan_step(projection, term, each, shape, shapes[target])
            if isinstance(step, str):
                problems.append(f"the LoRA pair of {rule.weight!r} for {target!r}: {step}")
            elif projection in steps:
                problems.append(f"two LoRA pairs change {target!r}")
            else:
                steps[projection] = step
    if problems:
        raise WeightSyncError(
            f"the adapter does not fit ({len(problems)} problem(s)):\n  " + "\n  ".join(problems)
        )
    ordered = tuple(steps.values())
    shardings = {name: spec.sharding for name, spec in slots.specs().items()}
    load = jax.jit(
        functools.partial(_load, steps=ordered, slots=slots), out_shardings=(shardings, None)
    )
    return AdapterPlan(ordered, slots, load)


def _kinds(names: set[str]) -> str:
    return ", ".join(sorted({name.rsplit(".", 1)[-1] for name in names})) or "nothing"


def weight_shape(term: LoraTerm, source: Mapping[str, ArraySpec]) -> tuple[int, ...]:
    """The shape of a pair's weight, derived from A and B."""
    inputs, outputs = list(source[term.a].shape[:-1]), list(source[term.b].shape[1:])
    num_axes = len(inputs) + len(outputs)
    return tuple((inputs if axis in term.in_axes else outputs).pop(0) for axis in range(num_axes))


def _plan_step(
    name: str,
    term: LoraTerm,
    found: Match,
    shape: tuple[int, ...],
    target: tuple[int, ...],
) -> _Step | str:
    """How A and B become those of the projection, or why they cannot."""
    rule = found.rule
    if rule.hook is not None:
        return "its rule has a hook, which cannot be applied to the factors; use lora='merged'"
    axes = list(range(len(shape)))
    in_axes, out_axes = list(term.in_axes), [axis for axis in axes if axis not in term.in_axes]
    parts = []
    taken = () if found.part is None else indices_by_axis(found.part, rule.part_axes, len(shape))
    for at, index in taken:
        if at in in_axes:
            parts.append(("a", in_axes.index(at), index))
            in_axes.remove(at)
        else:
            parts.append(("b", 1 + out_axes.index(at), index))
            out_axes.remove(at)
        axes.remove(at)
    if rule.transpose is not None:
        axes = [axes[index] for index in rule.transpose]
    if name == "lm_head":  # logical [vocab, model], transposed relative to projections
        first = len(out_axes)
        axes, target = [*axes[first:], *axes[:first]], target[::-1]
    num_in = len(in_axes)
    if set(axes[:num_in]) != set(in_axes):
        return "its inputs and outputs are interleaved in the engine's weight; use lora='merged'"
    sizes = (
        math.prod(shape[axis] for axis in axes[:num_in]),
        math.prod(shape[axis] for axis in axes[num_in:]),
    )
    if sizes != target:
        return f"it is for {list(sizes)}, the projection is {list(target)}"
    return _Step(
        name,
        term.a,
        term.b,
        tuple(parts),
        tuple(in_axes.index(axis) for axis in axes[:num_in]),
        tuple(out_axes.index(axis) for axis in axes[num_in:]),
        term.scale,
    )


# ------------------------------------------------------------------ the device program


def _load(
    serving: Weights,
    sources: list[tuple[jax.Array, jax.Array]],
    slot: jax.Array,
    *,
    steps: tuple[_Step, ...],
    slots: AdapterSlots,
) -> tuple[Weights, jax.Array]:
    """All slot arrays with one slot replaced; projections without a pair get zeros there.

    Slot arrays that are missing in `serving` have no other slot.
    """
    rank, specs = slots.max_rank, {name: both for name, *both in slots.targets}
    factors = {
        step.name: pair_factors(a, b, step) for step, (a, b) in zip(steps, sources, strict=True)
    }
    made: Weights = {}
    for name, (a_spec, b_spec) in specs.items():
        num_in, num_out = a_spec.shape[0], b_spec.shape[1]
        a, b = factors.get(name, (jnp.zeros((num_in, 0)), jnp.zeros((0, num_out))))
        padding = rank - a.shape[1]
        a, b = jnp.pad(a, ((0, 0), (0, padding))), jnp.pad(b, ((0, padding), (0, 0)))
        for suffix, x, spec, axis in ((A_SUFFIX, a, a_spec, 1), (B_SUFFIX, b, b_spec, 0)):
            x = x.astype(spec.dtype)
            if name + suffix not in serving:
                made[name + suffix] = jnp.copy(spec.form.store(x))  # never the source's own memory
                continue
            at = [jnp.int32(0), jnp.int32(0)]
            at[axis] = slot * rank
            others = spec.form.restore(serving[name + suffix], spec.shape)
            made[name + suffix] = spec.form.store(lax.dynamic_update_slice(others, x, at))
    return made, jnp.stack([is_finite(a) & is_finite(b) for a, b in factors.values()])


def pair_factors(a: jax.Array, b: jax.Array, step: _Step) -> tuple[jax.Array, jax.Array]:
    """A [in, r] and scale B [r, out] of a projection, float32."""
    for which, axis, index in step.parts:
        if which == "a":
            a = lax.index_in_dim(a, index, axis, keepdims=False)
        else:
            b = lax.index_in_dim(b, index, axis, keepdims=False)
    rank = b.shape[0]
    a = a.transpose((*step.a_axes, a.ndim - 1)).reshape(-1, rank)
    b = b.transpose((0, *(1 + axis for axis in step.b_axes))).reshape(rank, -1)
    return a.astype(jnp.float32), b.astype(jnp.float32) * jnp.float32(step.scale)
