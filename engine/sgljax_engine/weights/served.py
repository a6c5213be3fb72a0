"""Tracks which source arrays the serving weights were made from, to avoid remaking them.

A frozen parameter comes with every update as the same array object: LoRA actors have many.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from sgljax_engine.weights.sync import Step, SyncPlan, part_of_plan


class _Origin(NamedTuple):
    """How a serving weight was made, and from which arrays."""

    step: Step
    arrays: tuple[weakref.ref[Any], ...]


class ServedSource:
    """Remembers the source of the serving weights, weakly. Not thread-safe.

    JAX arrays never change, so the same array mapped in the same way is the same weight. Numpy
    arrays may change, so they always count as different.
    """

    def __init__(self) -> None:
        """Remembers nothing."""
        self._origins: dict[str, _Origin] = {}
        self._plan: SyncPlan | None = None
        self._parts: dict[frozenset[str], SyncPlan] = {}

    def remember(self, plan: SyncPlan, source: Mapping[str, Any]) -> None:
        """Records the source of the serving weights from now on."""
        self._origins = {}
        for step in plan.steps:
            arrays = step.arrays(source)
            if all(isinstance(x, jax.Array) for x in arrays):
                self._origins[step.target] = _Origin(step, tuple(map(weakref.ref, arrays)))

    def forget(self) -> None:
        """Forgets the source, for weights of unknown origin."""
        self._origins = {}

    def changed(self, plan: SyncPlan, source: Mapping[str, Any]) -> SyncPlan:
        """The part of a plan that makes weights different from the serving ones.

        If nothing changed, this is the whole plan, since the caller wants the weights made again.
        Equal parts give the same object, so that each is compiled once.
        """
        if plan is not self._plan:
            self._plan, self._parts = plan, {}
        names = frozenset(step.target for step in plan.steps if self._is_changed(step, source))
        if not names or len(names) == len(plan.steps):
            return plan
        if names not in self._parts:
            self._parts[names] = part_of_plan(plan, names)
        return self._parts[names]

    def _is_changed(self, step: Step, source: Mapping[str, Any]) -> bool:
        origin = self._origins.get(step.target)
        if origin is None or origin.step != step:
            return True
        arrays = step.arrays(source)
        return any(ref() is not x for ref, x in zip(origin.arrays, arrays, strict=True))
