"""Staged weights: made beside the serving weights, then published or discarded.

This is an update in two halves. Making weights may take long and may fail, for example when a
trainer's arrays are transferred, and touches nothing that serves. Publishing them is a swap between
two steps.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple

import jax

from sgljax_engine.core import commands as cmd
from sgljax_engine.core.adapter_loading import AdapterJob, AdapterLoader, CompareJob
from sgljax_engine.core.engines import Engines
from sgljax_engine.core.weight_updates import UpdateJob, WeightSource, WeightUpdater
from sgljax_engine.errors import EngineStateError, InvalidRequestError
from sgljax_engine.io_struct import PauseMode
from sgljax_engine.weights import sync
from sgljax_engine.weights.served import ServedSource
from sgljax_engine.weights.sync import WeightMaker

StagedState = Literal["staged", "published", "discarded"]


class StagedWeights:
    """A complete set of weights on the engine's devices that do not serve yet.

    See `Engine.stage_weights`. Only the engine that made them can publish them. They take the
    memory of one model until they are published, discarded or garbage-collected, or the engine is
    shut down. `sleep` does not move them. Any thread may read the properties.
    """

    def __init__(self, owner: object, weights: list[dict[str, jax.Array]]) -> None:
        """Takes weights of each engine that nobody else holds; `Stager` alone does this."""
        self._owner = owner
        self._weights = weights
        self._num_bytes = sum(weight.nbytes for each in weights for weight in each.values())
        self._state: StagedState = "staged"
        self._version: int | None = None

    @property
    def state(self) -> StagedState:
        """Staged, published or discarded; the last two are for ever."""
        return self._state

    @property
    def weight_version(self) -> int | None:
        """The version that they were published as; None before that."""
        return self._version

    @property
    def num_bytes(self) -> int:
        """What they take, or took, on the devices: bytes of all shards together."""
        return self._num_bytes

    def __repr__(self) -> str:
        """Says what became of them."""
        version = "" if self._version is None else f", weight_version={self._version}"
        return f"StagedWeights({self._state!r}, num_bytes={self._num_bytes}{version})"

    # ------------------------------------------------------------------ for the stager alone

    def is_of(self, owner: object) -> bool:
        """Whether they were made for this owner."""
        return self._owner is owner

    def build(self, olds: Sequence[cmd.Weights]) -> list[dict[str, jax.Array]]:
        """Hands them to the engine threads. They stay here too, in case the swap fails."""
        del olds
        return self._weights

    def published(self, version: int) -> None:
        """They serve: from now on only the engine holds them."""
        self._version, self._weights = version, []
        self._state = "published"

    def discard(self) -> bool:
        """Frees them now; False unless they were staged."""
        if self._state != "staged":
            return False
        self._state = "discarded"
        for weights in self._weights:
            for weight in weights.values():
                weight.delete()
        self._weights = []
        return True


class StageJob(NamedTuple):
    """One `stage_weights` call.

    Attributes:
        load: Reads the source; called on the worker's thread.
        verify: Compare checksums of the new weights and the source.
        check_finite: Refuse weights that hold NaN or infinity.
        future: Gets the staged weights.
    """

    load: Callable[[], WeightSource]
    verify: bool
    check_finite: bool
    future: Future[StagedWeights]


class PublishJob(NamedTuple):
    """One `publish_weights` call.

    Attributes:
        staged: What is to serve.
        mode: What becomes of requests that have started.
        flush_cache: See `commands.SwapWeights`.
        future: Gets the new weight version.
    """

    staged: StagedWeights
    mode: PauseMode
    flush_cache: bool
    future: Future[int]


class DiscardJob(NamedTuple):
    """One `discard_weights` call.

    Attributes:
        staged: What is to be freed.
        future: Gets whether anything was.
    """

    staged: StagedWeights
    future: Future[bool]


WeightJob = UpdateJob | AdapterJob | CompareJob | StageJob | PublishJob | DiscardJob
"""What the thread of weight updates does, in the order of the calls."""


class Stager:
    """Stages, publishes and discards, on the thread of a `Worker`: that of the `WeightUpdater`."""

    def __init__(
        self,
        maker: WeightMaker,
        served: ServedSource,
        engines: Engines,
    ) -> None:
        """Has staged nothing yet.

        Args:
            maker: Plans; the weight_updater's, which is used on the same thread.
            served: The weight_updater's too; published weights are of no source that it knows.
            engines: Those that will serve.
        """
        self._maker = maker
        self._served = served
        self._engines = engines
        self._owner = object()  # not this object: staged weights must not keep the engine
        self._staged: weakref.WeakSet[StagedWeights] = weakref.WeakSet()

    def stage(self, job: StageJob) -> StagedWeights:
        """Makes weights beside those that serve."""
        self._engines.check_open()
        with self._engines.reading():
            source = job.load()
            plan, arrays = self._maker.plan(
                source.arrays, source.rules, check_finite=job.check_finite
            )
            del source
            sync.await_source(arrays)
        make = functools.partial(sync.apply, plan, arrays, verify=job.verify)
        del arrays
        if plan.is_on_one_device:
            made = make()
        else:
            # Programs over several devices are the engine threads': see `WeightUpdater`.
            made = self._engines.ask(functools.partial(cmd.Run, make))
        staged = StagedWeights(self._owner, self._engines.split(made))
        self._staged.add(staged)
        return staged

    def publish(self, job: PublishJob) -> int:
        """Has staged weights served; returns their version, the same one whenever it is asked."""
        staged = job.staged
        self._check_own(staged)
        if staged.weight_version is not None:
            return staged.weight_version
        if staged.state == "discarded":
            raise EngineStateError("these staged weights were discarded; stage_weights makes new")
        self._engines.check_open()
        self._served.forget()
        make = functools.partial(cmd.SwapWeights, staged.build, job.mode, job.flush_cache)
        version = self._engines.swap(make, job.mode, "publish_weights")
        staged.published(version)
        return version

    def discard(self, job: DiscardJob) -> bool:
        """Frees staged weights; False if they were published or discarded before."""
        self._check_own(job.staged)
        return job.staged.discard()

    def release(self) -> None:
        """Frees all that is staged; for an engine that ends, when no job can come any more."""
        for staged in list(self._staged):
            staged.discard()

    def _check_own(self, staged: StagedWeights) -> None:
        if not staged.is_of(self._owner):
            raise InvalidRequestError("staged must be weights that this engine staged itself")


def do_weight_job(
    weight_updater: WeightUpdater, loader: AdapterLoader, stager: Stager, job: WeightJob
) -> Any:
    """Does one job of the weights' thread."""
    if isinstance(job, UpdateJob):
        return weight_updater.update(job)
    if isinstance(job, AdapterJob):
        return loader.load(job)
    if isinstance(job, CompareJob):
        return loader.compare(job)
    if isinstance(job, StageJob):
        return stager.stage(job)
    if isinstance(job, PublishJob):
        return stager.publish(job)
    return stager.discard(job)
