"""Tracks which source arrays the serving weights were made from, to avoid remaking them.

A frozen parameter comes with every update as the same array object: LoRA actors have many.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import jax

from sgljax_engine.weights.plan import SyncPlan, part_of_plan
from sgljax_engine.weights.specs import Step


class ServedSource:
    """Remembers the source of the serving weights, weakly. Not thread-safe.

    JAX arrays never change, so the same array mapped in the same way is the same weight. Numpy
    arrays may change, so they always count as different.
    """

    def __init__(self) -> None:
        self._steps: dict[str, Step] = {}
        self._arrays: dict[str, weakref.ref[Any]] = {}
        self._plan: SyncPlan | None = None
        self._parts: dict[frozenset[str], SyncPlan] = {}

    def remember(self, plan: SyncPlan, source: Mapping[str, Any]) -> None:
        """Records the source of the serving weights from now on."""
        self._steps = {step.target: step for step in plan.steps}
        self._arrays = {
            name: weakref.ref(x) for name, x in source.items() if isinstance(x, jax.Array)
        }

    def forget(self) -> None:
        self._steps, self._arrays = {}, {}

    def changed(self, plan: SyncPlan, source: Mapping[str, Any]) -> SyncPlan:
        """The part of a plan that makes weights different from the serving ones.

        If nothing changed, this is the whole plan, since the caller wants the weights made again.
        Equal parts give the same object, so that each is compiled once.
        """
        if plan is not self._plan:
            self._plan, self._parts = plan, {}
        known, steps = self._arrays, self._steps
        same = {name for name, x in source.items() if name in known and known[name]() is x}
        names = frozenset(
            [
                step.target
                for step, reads in zip(plan.steps, plan.reads, strict=True)
                if steps.get(step.target) != step or not same.issuperset(reads)
            ]
        )
        if not names or len(names) == len(plan.steps):
            return plan
        if names not in self._parts:
            self._parts[names] = part_of_plan(plan, names)
        return self._parts[names]
