"""Checks of an update: of its source before, and of the weights that were made from it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax

from sgljax_engine.errors import WeightSyncError
from sgljax_engine.weights.checksum import checksum, to_hex
from sgljax_engine.weights.finite import is_finite, refuse_not_finite
from sgljax_engine.weights.forms import Form
from sgljax_engine.weights.moves import near
from sgljax_engine.weights.plan import SyncPlan
from sgljax_engine.weights.specs import Sources, Step, TargetSpec, Weights, source_spec
from sgljax_engine.weights.transform import to_logical, transform


def await_source(source: Mapping[str, Any]) -> None:
    """Waits until the source's arrays are computed. Any thread; only the calling thread waits."""
    _check_alive(source)
    try:
        jax.block_until_ready([x for x in source.values() if isinstance(x, jax.Array)])
    except Exception as error:
        raise WeightSyncError(f"computing the new weights failed: {error}") from error


def check_planned(plan: SyncPlan, source: Mapping[str, Any]) -> None:
    """Raises WeightSyncError for a source of another specification, or with deleted arrays."""
    if source_spec(source) != plan.source_spec:
        raise WeightSyncError("the source changed its names, shapes or dtypes since it was planned")
    _check_alive(source)


def _check_alive(source: Mapping[str, Any]) -> None:
    deleted = [n for n, x in source.items() if isinstance(x, jax.Array) and x.is_deleted()]
    if deleted:
        raise WeightSyncError(f"source parameters were deleted, or donated to a program: {deleted}")


def check_finite(plan: SyncPlan, source: Mapping[str, Any]) -> None:
    """Checks the mapped source, one weight after the other, before any old weight is freed."""
    if not plan.checks_finite:
        return
    operands = plan.operands(source)
    flags: list[bool] = []
    for name, target in plan.targets.items():
        with near(target.sharding):
            flags.append(bool(_is_mapped_finite(next(operands), *plan.nameless[name])))
    refuse_not_finite(list(plan.targets), flags)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _is_mapped_finite(sources: Sources, step: Step, target: TargetSpec) -> jax.Array:
    if target.quantized is None:
        return is_finite(to_logical(sources, step, target))
    return is_finite(transform(sources, step))


def check_same(plan: SyncPlan, source: Mapping[str, Any], weights: Weights) -> None:
    """Raises WeightSyncError unless every weight holds the bits of its mapped source."""
    wrong = differing(plan, source, weights)
    if wrong:
        raise WeightSyncError(f"checksums of the new weights differ from the source's: {wrong}")


def differing(plan: SyncPlan, source: Mapping[str, Any], weights: Weights) -> list[str]:
    """Names of weights that do not hold the bits of their mapped source, sorted.

    The source is mapped again at its own place, without the engine's physical layout. This gives
    the same bits if hooks only move and cast: arithmetic may round differently in another program.
    """
    arrays, _ = plan.program.gather(list(plan.operands(source)))
    with near(next(iter(plan.targets.values())).sharding):
        wanted = to_hex(
            _checksums_one_by_one(plan, arrays) if plan.stacks else plan.program.checksums(arrays)
        )
    found = checksums(weights, plan.targets)
    return sorted(name for name in wanted if wanted[name] != found[name])


def _checksums_one_by_one(plan: SyncPlan, arrays: list[Sources]) -> dict[str, jax.Array]:
    found = {}
    for name, sources in zip(plan.targets, arrays, strict=True):
        one = _mapped_alone(sources, *plan.nameless[name])
        found[name] = jax.block_until_ready(_checksum_alone(one))
    return found


_mapped_alone = jax.jit(to_logical, static_argnums=(1, 2))
_checksum_alone = jax.jit(checksum)


def checksums(
    weights: Mapping[str, jax.Array], targets: Mapping[str, TargetSpec]
) -> dict[str, str]:
    """Checksums of stored weights in their logical shapes, 16 hexadecimal digits each."""
    forms = tuple(
        (name, target.form, target.shape)
        for name, target in targets.items()
        if name in weights and target.form is not Form.LOGICAL
    )
    return to_hex(_stored_checksums(dict(weights), forms))


@functools.partial(jax.jit, static_argnums=1)
def _stored_checksums(
    weights: Weights, forms: tuple[tuple[str, Form, tuple[int, ...]], ...]
) -> dict[str, jax.Array]:
    logical = {name: form.restore(weights[name], shape) for name, form, shape in forms}
    return {name: checksum(logical.get(name, w)) for name, w in weights.items()}
