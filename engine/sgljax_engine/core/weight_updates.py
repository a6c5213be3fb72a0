"""Weight updates: a worker makes new weights, and the engine threads swap them in between steps.

A `Worker` does updates one after another, in the order of their calls.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax

from sgljax_engine.core import commands as cmd
from sgljax_engine.core.engines import Engines, Split
from sgljax_engine.io_struct import PauseMode
from sgljax_engine.observability.trace import UPDATES_TRACK, Recorder
from sgljax_engine.weights import sync
from sgljax_engine.weights.rules import WeightRule
from sgljax_engine.weights.served import ServedSource
from sgljax_engine.weights.sync import SyncPlan, WeightMaker


class WeightSource(NamedTuple):
    """Named arrays and the rules that map them onto the engine's parameters."""

    arrays: Any
    rules: Sequence[WeightRule]


_Make = Callable[[Sequence[cmd.Weights]], dict[str, jax.Array]]
"""Makes the weights of all engines in one; gets those that serve."""


class UpdateJob(NamedTuple):
    """One `update_weights` call.

    Attributes:
        load: Reads the source; called on the worker's thread.
        mode: What becomes of requests that have started.
        flush_cache: See `commands.SwapWeights`.
        donate: Make each weight in the place of the old one.
        verify: Compare checksums of the new weights and the source.
        check_finite: Refuse weights that hold NaN or infinity.
        future: Gets the new weight version.
    """

    load: Callable[[], WeightSource]
    mode: PauseMode
    flush_cache: bool
    donate: bool
    verify: bool
    check_finite: bool
    future: Future[int]


class WeightUpdater:
    """Does updates, on the thread of a `Worker`."""

    def __init__(
        self,
        maker: WeightMaker,
        served: ServedSource,
        engines: Engines,
        recorder: Recorder,
    ) -> None:
        """Does nothing yet.

        Args:
            maker: Plans; from now on used by this object alone.
            served: What the weights that serve were made of.
            engines: Those that serve them.
            recorder: Notes what is done.
        """
        self._maker = maker
        self._served = served
        self._engines = engines
        self._recorder = recorder
        self._compiled: tuple[SyncPlan, Any] | None = None

    def update(self, job: UpdateJob) -> int:
        """Makes the new weights and has them swapped in; returns their version."""
        self._engines.check_open()
        began = time.perf_counter()
        with self._engines.reading():
            source = job.load()
            plan, arrays = self._maker.plan(
                source.arrays, source.rules, check_finite=job.check_finite
            )
            del source
            sync.await_source(arrays)
        # The checksums of `verify` are those of all weights.
        changed = plan if job.verify else self._served.changed(plan, arrays)
        split = self._engines.split
        build = _whole(plan, changed, arrays, split, self._prepare(changed, arrays, job))
        make = functools.partial(cmd.SwapWeights, build, job.mode, job.flush_cache)
        submitted = time.perf_counter()
        try:
            version = self._engines.swap(make, job.mode, "update_weights")
        except BaseException:
            self._served.forget()
            raise
        finally:
            del build, make
        self._served.remember(plan, arrays)
        del arrays
        if self._recorder.is_on:
            ended, args = time.perf_counter(), {"weight_version": version}
            self._recorder.slice(UPDATES_TRACK, "prepare weights", began, submitted, args)
            self._recorder.slice(UPDATES_TRACK, "wait for the swap", submitted, ended, args)
        return version

    def _prepare(self, plan: SyncPlan, arrays: Mapping[str, Any], job: UpdateJob) -> _Make:
        """Makes the weights on the worker's thread, or leaves that to the engine thread.

        The engine thread must do it in two cases, while those of a group all wait. A donating
        update takes old weights apart. And weights that are spread over devices need one order of
        programs: two threads may queue theirs in different orders on different devices, and these
        then wait for one another.

        The engine thread also does it when engine and source share a CPU, because two programs at
        once hold each other up there. The first update of a kind is made by the worker even so,
        since it compiles.
        """
        if job.donate:
            return lambda olds: sync.apply_donating(plan, arrays, olds, verify=job.verify)
        kind = self._kind_on_shared_cores(plan, arrays, job)
        if not plan.is_on_one_device or (kind is not None and kind == self._compiled):
            return lambda olds: sync.apply(plan, arrays, verify=job.verify)
        made = _PreparedWeights(sync.apply(plan, arrays, verify=job.verify))
        self._compiled = kind
        return made.take

    def _kind_on_shared_cores(
        self, plan: SyncPlan, arrays: Mapping[str, Any], job: UpdateJob
    ) -> tuple[SyncPlan, Any] | None:
        """What the update's one program is compiled for, if decoding and source share a CPU.

        Also None for an update that waits for requests to finish: its source is read at once.
        """
        if not plan.is_on_own_cpus or job.verify or job.mode == "wait":
            return None
        placement = sync.placement(plan, arrays)
        return None if placement is None else (plan, placement)


def _whole(
    plan: SyncPlan,
    changed: SyncPlan,
    arrays: Mapping[str, Any],
    split: Split,
    make: _Make,
) -> cmd.BuildWeights:
    """What `make` makes of what is changed, with the weights that serve on, for each engine."""
    kept = plan.names - changed.names

    def build(olds: Sequence[cmd.Weights]) -> list[dict[str, jax.Array]]:
        if kept and not all(kept <= old.keys() for old in olds):  # they sleep, or were lost
            return split(sync.apply(plan, arrays))
        rests = [{name: old[name] for name in kept} for old in olds]
        made = split(make(olds))
        return [rest | new for rest, new in zip(rests, made, strict=True)]

    return build


class _PreparedWeights:
    """Weights on their way to the engine thread; nobody holds them once they are taken."""

    def __init__(self, weights: dict[str, jax.Array]) -> None:
        self._weights = weights

    def take(self, olds: Sequence[cmd.Weights]) -> dict[str, jax.Array]:
        del olds
        weights, self._weights = self._weights, {}
        return weights
