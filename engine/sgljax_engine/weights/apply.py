"""Runs a plan of weight sync on a source's arrays, beside the weights in use or in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from sgljax_engine.errors import WeightsLostError, WeightSyncError
from sgljax_engine.layers.devices import is_own_cpu
from sgljax_engine.weights.checks import check_finite, check_planned, check_same
from sgljax_engine.weights.finite import refuse_not_finite
from sgljax_engine.weights.moves import move, near
from sgljax_engine.weights.plan import SyncPlan
from sgljax_engine.weights.specs import Sources, Weights


def apply(
    plan: SyncPlan,
    source: Mapping[str, Any],
    olds: Sequence[Weights] | None = None,
    *,
    verify: bool = False,
) -> Weights:
    """Makes all engine parameters from the source and waits for them. Any thread.

    A source on other devices than the engine is transformed there and then moved. The result never
    shares memory with the source. Without `olds` a failure leaves the weights in use as they are;
    the caller swaps the returned ones in.

    With `olds`, the weights in use of each engine, the new ones are made in the memory of about one
    model: each old weight is freed before its successor is made. This call empties the mappings; do
    not use them again. WeightsLostError says that it failed after the first old weight was freed.
    """
    check_planned(plan, source)
    if olds is not None:
        check_finite(plan, source)
    try:
        made = jax.block_until_ready(_make(plan, source, olds))
        if verify:
            check_same(plan, source, made)
    except Exception as error:
        if olds is not None:
            raise WeightsLostError(
                f"making new weights in the place of the old ones failed half-way: {error}"
            ) from error
        if isinstance(error, WeightSyncError):
            raise
        raise WeightSyncError(f"transforming the new weights failed: {error}") from error
    return made


def _make(plan: SyncPlan, source: Mapping[str, Any], olds: Sequence[Weights] | None) -> Weights:
    """Dispatches one program for all weights if that can be, else one program a weight.

    If weights must be finite, it waits for the transformation and refuses those that are not. JAX
    takes longer to find that a hundred arrays need no move than to check the source.
    """
    operands = plan.operands(source)
    if olds is not None:
        return _make_one_by_one(plan, operands, olds, check_finite=False)  # the source was checked
    arrays, devices = plan.program.gather(list(operands))
    run = plan.program.at_target if devices is None else plan.program.at_source(devices)
    if plan.stacks or run is None:
        return _make_one_by_one(plan, iter(arrays), (), check_finite=plan.checks_finite)
    weights, flags = run(arrays)
    refuse_not_finite(list(plan.targets), flags)
    return weights if devices is None else jax.device_put(weights, plan.program.shardings)


def _make_one_by_one(
    plan: SyncPlan, operands: Iterator[Sources], olds: Sequence[Weights], *, check_finite: bool
) -> Weights:
    """Transforms at the source and moves one weight after another: `move` needs room for each.

    Frees the old weight first, and takes no operands before.
    """
    made: Weights = {}
    flags: list[jax.Array] = []
    for name, target in plan.targets.items():
        for old in olds:
            if name in old:  # absent after a failed update
                old.pop(name).delete()
        with near(target.sharding):
            one, flag = _store_one(plan, next(operands), name)
        made[name] = jax.block_until_ready(move(one, target.sharding))
        if check_finite:
            flags.append(flag)
        del one, flag  # before the next ones are made
    refuse_not_finite(list(made), [bool(flag) for flag in flags] if check_finite else None)
    return made


def _store_one(plan: SyncPlan, sources: Sources, name: str) -> tuple[jax.Array, jax.Array]:
    """One parameter in its stored form, and whether it is finite; equal steps share a program."""
    is_native = plan.program.is_native and all(
        not isinstance(x, jax.Array) or all(map(is_own_cpu, x.devices())) for x in sources
    )
    return plan.program.one(sources, *plan.nameless[name], is_native)
