"""Loading adapters: pairs are planned beside the decode loop and written between two dispatches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from sgljax_engine.core import commands as cmd
from sgljax_engine.core.engines import Engines
from sgljax_engine.core.weight_updates import WeightSource
from sgljax_engine.errors import EngineStateError
from sgljax_engine.io_struct import PauseMode
from sgljax_engine.weights import sync
from sgljax_engine.weights.adapters import AdapterSlots, plan_adapter
from sgljax_engine.weights.sync import TargetSpec


class AdapterJob(NamedTuple):
    """One `load_adapter` call.

    Attributes:
        name: Of the adapter.
        load: Reads the source; called on the worker's thread.
        mode: What becomes of requests that have started with an adapter of this name.
        flush_cache: See `commands.SwapWeights`.
        check_finite: Refuse pairs that hold NaN or infinity.
        future: Gets the new weight version.
    """

    name: str
    load: Callable[[], WeightSource]
    mode: PauseMode
    flush_cache: bool
    check_finite: bool
    future: Future[int]


class CompareJob(NamedTuple):
    """One `find_differing_adapter` call; gets the names of projections that differ."""

    name: str
    load: Callable[[], WeightSource]
    future: Future[list[str]]


class AdapterLoader:
    """Loads adapters, on the thread of a `Worker`: that of the `WeightUpdater`."""

    def __init__(
        self,
        slots: Sequence[AdapterSlots] | None,
        targets: Mapping[str, TargetSpec],
        engines: Engines,
    ) -> None:
        """Loads nothing yet.

        Args:
            slots: The room that each engine has; None without.
            targets: All parameters of the model.
            engines: Those that will serve.
        """
        self._slots = slots
        self._targets = dict(targets)
        self._engines = engines

    def load(self, job: AdapterJob) -> int:
        """Has an adapter loaded; returns the version of the weights with it.

        Raises:
            EngineStateError: for an engine without adapters.
        """
        build = self._prepare(job, check_finite=job.check_finite)
        make = functools.partial(cmd.SwapAdapter, job.name, build, job.mode, job.flush_cache)
        return self._engines.swap(make, job.mode, "load_adapter")

    def compare(self, job: CompareJob) -> list[str]:
        """Names of projections whose adapter is not what the source makes of it."""
        build = self._prepare(job, check_finite=False)
        return self._engines.ask(functools.partial(cmd.CompareAdapter, job.name, build))

    def _prepare(self, job: AdapterJob | CompareJob, *, check_finite: bool) -> cmd.BuildAdapter:
        self._engines.check_open()
        if self._slots is None:
            raise EngineStateError(
                f"adapter {job.name!r} finds no slot: the engine was made with max_loras=0"
            )
        with self._engines.reading():
            source = job.load()
            planned = [
                plan_adapter(source.arrays, source.rules, slots, self._targets)
                for slots in self._slots
            ]
            del source
            arrays = planned[0][1]
            sync.await_source(arrays)
        plans = [plan for plan, _ in planned]

        def build(servings: Sequence[cmd.Weights], slot: int) -> list[cmd.Weights]:
            return [
                plan.build(arrays, serving, slot, check_finite=check_finite)
                for plan, serving in zip(plans, servings, strict=True)
            ]

        return build
