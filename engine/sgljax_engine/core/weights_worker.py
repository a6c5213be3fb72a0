"""The thread that makes new weights and adapters, and has the engines swap them in.

Jobs are done one after another, in the order of their calls. An update is stage and publish in one:
weights are made beside the serving ones, which may take long and may fail, and are swapped in
between two steps.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax

from sgljax_engine.core import commands as cmd
from sgljax_engine.core.command import Ask
from sgljax_engine.core.commands.weights import BuildWeights, Weights
from sgljax_engine.errors import EngineShutdownError, EngineStateError, InvalidRequestError
from sgljax_engine.io_struct import NewVersion, PauseMode
from sgljax_engine.observability.trace import UPDATES_TRACK, Recorder
from sgljax_engine.processing.worker import Worker
from sgljax_engine.weights.adapters import AdapterSlots, plan_adapter
from sgljax_engine.weights.apply import apply
from sgljax_engine.weights.checks import await_source
from sgljax_engine.weights.plan import SyncPlan, WeightPlanner
from sgljax_engine.weights.rules import WeightSource
from sgljax_engine.weights.served import ServedSource
from sgljax_engine.weights.staged import StagedWeights

_P = ParamSpec("_P")
_T = TypeVar("_T")

Split = Callable[[Mapping[str, jax.Array]], list[dict[str, jax.Array]]]
"""Splits weights that were made for all engines into each one's part; copies nothing."""


class WeightJob(NamedTuple):
    do: Callable[[], Any]
    future: Future[Any]


def job(
    method: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
) -> Callable[[Future[_T]], WeightJob]:
    """Makes the job that calls a method of `WeightsWorker` on its thread, with its future."""
    return functools.partial(WeightJob, functools.partial(method, *args, **kwargs))


class _NewWeights:
    def __init__(self, plan: SyncPlan, arrays: Mapping[str, Any], *, verify: bool) -> None:
        self.plan = plan
        self.arrays = arrays
        self.verify = verify
        self.made: dict[str, jax.Array] | None = None

    def make(self) -> dict[str, jax.Array]:
        return apply(self.plan, self.arrays, verify=self.verify)

    def get(self, olds: Sequence[Weights], *, donate: bool) -> dict[str, jax.Array]:
        """The weights: hands over those that were made, or makes them now."""
        made, self.made = self.made, None
        if made is not None:
            return made
        return apply(self.plan, self.arrays, olds if donate else None, verify=self.verify)


class WeightsWorker:
    """Makes weights and adapters, one job after another, on a thread of its own."""

    def __init__(
        self,
        *,
        planner: WeightPlanner,
        served: ServedSource,
        slots: Sequence[AdapterSlots] | None,
        split: Split,
        ask: Ask,
        check_open: Callable[[], None],
        recorder: Recorder,
        name: str,
    ) -> None:
        self._planner = planner
        self._served = served
        self._slots = slots
        self._split = split
        self._ask = ask
        self._check_open = check_open
        self._recorder = recorder
        self._compiled: tuple[SyncPlan, Any] | None = None
        self._owner = object()  # not this object: staged weights must not keep the engine
        self._staged: weakref.WeakSet[StagedWeights] = weakref.WeakSet()
        self._worker: Worker[WeightJob] = Worker(lambda job: job.do(), name)
        self.thread = self._worker.thread

    def put(self, job: WeightJob) -> None:
        self._worker.put(job)

    def stop(self, reason: str) -> None:
        """Ends the thread and frees staged weights; call it when no job can come any more."""
        self._worker.stop(reason)
        for staged in list(self._staged):
            staged.discard()

    # ------------------------------------------------------------------ on the worker's thread

    def update(
        self,
        load: Callable[[], WeightSource],
        mode: PauseMode,
        flush_cache: bool,
        *,
        donate: bool,
        verify: bool,
        check_finite: bool,
        version: NewVersion,
    ) -> int:
        """Makes the new weights and has them swapped in; returns their version.

        `load` reads the source. `donate` makes each weight in the place of the old one; `verify`
        compares checksums of the new weights and the source; `check_finite` refuses NaN and
        infinity.
        """
        began = time.perf_counter()
        planned = self._plan(load, check_finite=check_finite, verify=verify)
        plan, arrays = planned.plan, planned.arrays
        # The checksums of `verify` are those of all weights.
        changed = plan if verify else self._served.changed(plan, arrays)
        new = _NewWeights(changed, arrays, verify=verify)
        if self._is_made_here(new, mode, donate=donate):
            new.made = new.make()
        build = self._whole(planned, new, donate=donate)
        submitted = time.perf_counter()
        served = self._serve(build, mode, flush_cache, version, "update_weights")
        del build
        self._served.remember(plan, arrays)
        del arrays
        if self._recorder.is_on:
            ended, args = time.perf_counter(), {"weight_version": served}
            self._recorder.slice(UPDATES_TRACK, "prepare weights", began, submitted, args)
            self._recorder.slice(UPDATES_TRACK, "wait for the swap", submitted, ended, args)
        return served

    def stage(
        self, load: Callable[[], WeightSource], *, verify: bool, check_finite: bool
    ) -> StagedWeights:
        """Makes weights beside the serving ones; see `update`."""
        new = self._plan(load, check_finite=check_finite, verify=verify)
        if new.plan.is_on_one_device:
            made = new.make()
        else:
            made = self._ask(functools.partial(cmd.Run, new.make))  # see `_is_made_here`
        del new
        staged = StagedWeights(self._owner, self._split(made))
        self._staged.add(staged)
        return staged

    def publish(
        self, staged: StagedWeights, mode: PauseMode, flush_cache: bool, version: NewVersion
    ) -> int:
        """Has staged weights served; returns their version, the same one whenever it is asked."""
        self._check_own(staged)
        if staged.weight_version is not None:
            if version.number not in (None, staged.weight_version):
                raise InvalidRequestError(
                    f"version must be {staged.weight_version}, which these weights were published "
                    f"as, got {version.number}"
                )
            return staged.weight_version
        if staged.state == "discarded":
            raise EngineStateError("these staged weights were discarded; stage_weights makes new")
        self._check_open()
        served = self._serve(staged.build, mode, flush_cache, version, "publish_weights")
        staged.published(served)
        return served

    def discard(self, staged: StagedWeights) -> bool:
        """Frees staged weights; False if they were published or discarded before."""
        self._check_own(staged)
        return staged.discard()

    def load_adapter(
        self,
        name: str,
        load: Callable[[], WeightSource],
        mode: PauseMode,
        flush_cache: bool,
        *,
        check_finite: bool,
        version: NewVersion,
    ) -> int:
        """Has an adapter loaded; returns the version of the weights with it. See `update`."""
        build = self._plan_adapter(name, load, check_finite=check_finite)
        make = functools.partial(cmd.SwapAdapter, mode, flush_cache, name, build, version=version)
        return self._swap(make, mode, "load_adapter")

    def find_differing_adapter(self, name: str, load: Callable[[], WeightSource]) -> list[str]:
        build = self._plan_adapter(name, load, check_finite=False)
        return self._ask(functools.partial(cmd.CompareAdapter, name, build))

    def _check_own(self, staged: StagedWeights) -> None:
        if not staged.is_of(self._owner):
            raise InvalidRequestError("staged must be weights that this engine staged itself")

    def _swap(
        self, make: Callable[[Future[int]], cmd.GroupCommand], mode: PauseMode, name: str
    ) -> int:
        """Has all engines swap weights or an adapter; returns the new version.

        With mode "wait" started requests finish first, and no others start. After a failure,
        engines that wait for the swap go on.
        """
        if mode != "wait":
            return self._ask(make)
        try:
            self._ask(functools.partial(cmd.Drain, name))
            return self._ask(make)
        except BaseException:
            with contextlib.suppress(EngineShutdownError):
                self._ask(cmd.EndDrain)
            raise

    def _plan_adapter(
        self, name: str, load: Callable[[], WeightSource], *, check_finite: bool
    ) -> cmd.BuildAdapter:
        """Plans an adapter's pairs in the slots of each engine."""
        self._check_open()
        if self._slots is None:
            raise EngineStateError(
                f"adapter {name!r} finds no slot: the engine was made with max_loras=0"
            )
        with self._worker.reading():
            source = load()
            planned = [
                plan_adapter(source.arrays, source.rules, slots, self._planner.targets)
                for slots in self._slots
            ]
            del source
            arrays = planned[0][1]
            await_source(arrays)
        plans = [plan for plan, _ in planned]

        def build(servings: Sequence[Weights], slot: int) -> list[Weights]:
            return [
                plan.build(arrays, serving, slot, check_finite=check_finite)
                for plan, serving in zip(plans, servings, strict=True)
            ]

        return build

    def _plan(
        self, load: Callable[[], WeightSource], *, check_finite: bool, verify: bool
    ) -> _NewWeights:
        self._check_open()
        with self._worker.reading():
            source = load()
            plan, arrays = self._planner.plan(
                source.arrays, source.rules, check_finite=check_finite
            )
            del source
            await_source(arrays)
        return _NewWeights(plan, arrays, verify=verify)

    def _serve(
        self,
        build: BuildWeights,
        mode: PauseMode,
        flush_cache: bool,
        version: NewVersion,
        name: str,
    ) -> int:
        """Has weights swapped in; afterwards their source is unknown, whatever failed."""
        make = functools.partial(cmd.SwapWeights, mode, flush_cache, build, version=version)
        try:
            return self._swap(make, mode, name)
        finally:
            self._served.forget()
            del make, build

    def _is_made_here(self, new: _NewWeights, mode: PauseMode, *, donate: bool) -> bool:
        """Whether an update's weights are made on the worker's thread, or at the swap.

        An engine thread must make them in two cases, while all threads of the group wait. A
        donating update takes old weights apart. Weights spread over devices need one order of
        programs: two threads may queue theirs in different orders on different devices, which then
        wait for one another.

        The engine thread also does it when engine and source share a CPU, because two programs at
        once hold each other up there. The worker still makes the first update of a kind, since that
        compiles.
        """
        if donate:
            return False
        kind = self._kind_on_shared_cores(new, mode)
        if not new.plan.is_on_one_device or (kind is not None and kind == self._compiled):
            return False
        self._compiled = kind
        return True

    def _kind_on_shared_cores(
        self, new: _NewWeights, mode: PauseMode
    ) -> tuple[SyncPlan, Any] | None:
        """What the update's program is compiled for, if decoding and source share a CPU; else None.

        Also None for an update that waits for requests to finish: its source is read at once.
        """
        program = new.plan.program
        if not program.is_on_own_cpus or new.verify or mode == "wait":
            return None
        placement = program.placement(new.arrays)
        return None if placement is None else (new.plan, placement)

    def _whole(self, planned: _NewWeights, new: _NewWeights, *, donate: bool) -> BuildWeights:
        """All weights of each engine: the changed ones and the serving ones that stay."""
        kept = planned.plan.names - new.plan.names

        def build(olds: Sequence[Weights]) -> list[dict[str, jax.Array]]:
            if kept and not all(kept <= old.keys() for old in olds):  # they sleep, or were lost
                return self._split(apply(planned.plan, planned.arrays))
            rests = [{name: old[name] for name in kept} for old in olds]
            made = self._split(new.get(olds, donate=donate))
            return [rest | each for rest, each in zip(rests, made, strict=True)]

        return build
