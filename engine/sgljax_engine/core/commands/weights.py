"""Commands that swap weights and adapters between two dispatches, and that inspect them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax

from sgljax_engine.core.command import PerEngineCommand
from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.core.transaction import GroupCommand
from sgljax_engine.errors import (
    EngineError,
    EngineStateError,
    WeightsLostError,
    WeightSyncError,
)
from sgljax_engine.io_struct import NewVersion, PauseMode
from sgljax_engine.runner.serving_weights import ServingWeights
from sgljax_engine.weights.rules import WeightRule

Weights = dict[str, jax.Array]
BuildWeights = Callable[[Sequence[Weights]], Sequence[Mapping[str, jax.Array]]]
"""Makes the new weights of each engine from the serving ones, which it may donate."""
BuildAdapter = Callable[[Sequence[Weights], int], Sequence[Weights]]
"""(serving A and B of each engine by name, slot) -> the same with an adapter in the slot."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Swap(GroupCommand):
    """Serve other weights, or other adapters, from the next dispatch on.

    No engine serves anything new before all are made, so `rollback` has nothing to put back.

    Attributes:
        mode: What happens to started requests.
        flush_cache: Refuse if keys and values of the old weights would stay in use.
        version: The version that is served from then on.
    """

    mode: PauseMode
    flush_cache: bool
    version: NewVersion = dataclasses.field(default=NewVersion(), kw_only=True)

    # ------------------------------------------------------------------ what is swapped

    def check(self, serving: ServingWeights) -> None:
        """Raises EngineStateError when nothing can be swapped in."""

    def make(self, serving: Sequence[ServingWeights]) -> Sequence[Mapping[str, jax.Array]]:
        """All arrays that each engine serves afterwards. Changes no serving array.

        Raises WeightsLostError when a donating update failed half-way, so that serving ones are
        gone.
        """
        raise NotImplementedError

    def swapped(self, serving: ServingWeights) -> int | None:
        """Notes that they serve; returns the changed adapter's slot, or None for all weights."""

    # ------------------------------------------------------------------ the transaction

    def prepare(self, core: EngineCore) -> float:
        num_running = len(core.scheduler.running)
        if self.flush_cache and self.mode == "in_place" and num_running:
            raise EngineStateError(
                f"flush_cache=True with mode='in_place': {num_running} running request(s) would "
                "go on with keys and values of the old weights"
            )
        self.version.after(core.serving.version)
        self.check(core.serving)
        return time.perf_counter()

    def together(
        self, cores: Sequence[EngineCore], prepared: Sequence[float]
    ) -> list[tuple[float, Mapping[str, jax.Array]]]:
        """Makes the arrays of all engines; after a failure all keep the old weights."""
        made = self.make([core.serving for core in cores])
        return list(zip(prepared, made, strict=True))

    def commit(self, core: EngineCore, prepared: tuple[float, Mapping[str, jax.Array]]) -> int:
        started_s, made = prepared
        core.serving.swap(made, self.version.after(core.serving.version))
        slot = self.swapped(core.serving)
        if not core.sleep_manager.asleep:
            core.recorder.end("asleep")
        self._forget_computed(core, slot)
        core.stats.swapped(started_s, core.serving.version, self.mode)
        core.end_drain()
        return core.serving.version

    def rollback(self, core: EngineCore, prepared: float | None, error: BaseException) -> None:
        """Keeps the old weights, unless a donating update lost them."""
        del prepared
        if isinstance(error, WeightsLostError):
            core.serving.were_lost(str(error))
            core.fail_all(EngineStateError(str(error)))
        core.end_drain()

    def _forget_computed(self, core: EngineCore, slot: int | None) -> None:
        """Keeps the prefix cache from matching what other weights or another adapter computed.

        Running requests keep their pages for themselves, since the cache takes no page from before
        its reset.
        """
        core.pool.reset_cache(slot)
        # "wait" found nobody to wait for, or no weights to wait under.
        core.apply_pause_mode("retract" if self.mode == "wait" else self.mode, slot)
        for request in core.scheduler.waiting:
            if not request.output_ids and slot in (None, request.adapter):
                request.prompt_logprobs = None  # scored when it starts again


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SwapWeights(Swap):
    """Serve other weights; answers with the new weight version."""

    build: BuildWeights
    future: Future[int]

    def make(self, serving: Sequence[ServingWeights]) -> list[dict[str, jax.Array]]:
        try:
            made = self.build([each.on_device for each in serving])
            return [each.with_adapters(new) for each, new in zip(serving, made, strict=True)]
        except WeightsLostError as error:
            if serving[0].sleep_on_host:  # where nothing was taken apart
                raise WeightSyncError(str(error)) from error
            raise


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ChecksumWeights(PerEngineCommand):
    """Checksums of the serving weights by name."""

    future: Future[dict[str, str]]

    def run(self, core: EngineCore) -> dict[str, str]:
        core.check_awake()
        return core.runner.checksum_weights()()

    def combine(self, answers: Sequence[dict[str, str]]) -> dict[str, str]:
        """The checksums, which must agree in all engines."""
        if any(answer != answers[0] for answer in answers):
            raise EngineError("the engines of the group serve different weights (a bug)")
        return answers[0]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CompareWeights(GroupCommand):
    """Find serving weights whose bits differ from a mapped source; answers with their names."""

    source: Any
    rules: Sequence[WeightRule]
    future: Future[list[str]]

    def prepare(self, core: EngineCore) -> None:
        core.check_awake()

    def together(self, cores: Sequence[EngineCore], prepared: Sequence[None]) -> list[list[str]]:
        del prepared
        return [core.runner.differing_weights(self.source, self.rules) for core in cores]

    def commit(self, core: EngineCore, prepared: list[str]) -> list[str]:
        del core
        return prepared

    def combine(self, answers: Sequence[list[str]]) -> list[str]:
        return sorted({name for answer in answers for name in answer})


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SwapAdapter(Swap):
    """Serve an adapter; it replaces one of the same name."""

    adapter: str
    build: BuildAdapter
    future: Future[int]

    def check(self, serving: ServingWeights) -> None:
        """Raises EngineStateError when there are no weights, or no slot is free."""
        if not serving.are_held:
            raise EngineStateError(
                "the engine has no weights to load an adapter beside: update_weights first"
            )
        serving.adapters.reserve(self.adapter)

    def make(self, serving: Sequence[ServingWeights]) -> list[dict[str, jax.Array]]:
        slot = serving[0].adapters.reserve(self.adapter)
        slots = self.build([each.slots for each in serving], slot)
        return [each.with_slots(new) for each, new in zip(serving, slots, strict=True)]

    def swapped(self, serving: ServingWeights) -> int:
        slot = serving.adapters.reserve(self.adapter)
        serving.adapters.add(self.adapter, slot)
        return slot


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class UnloadAdapter(GroupCommand):
    adapter: str
    future: Future[None]

    def prepare(self, core: EngineCore) -> int:
        """The slot of an adapter that no request uses."""
        slot = core.serving.adapters.find(self.adapter)
        users = [request for request in core.scheduler.requests() if request.adapter == slot]
        if users:
            raise EngineStateError(
                f"adapter {self.adapter!r} cannot be unloaded: {len(users)} unfinished request(s) "
                f"use it, {users[0].rid!r} among them"
            )
        return slot

    def commit(self, core: EngineCore, prepared: int) -> None:
        core.pool.reset_cache(prepared)
        core.serving.adapters.remove(self.adapter)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CompareAdapter(GroupCommand):
    """Find projections whose adapter differs from a source's; answers with their names."""

    adapter: str
    build: BuildAdapter
    future: Future[list[str]]

    def prepare(self, core: EngineCore) -> None:
        core.check_awake()

    def together(self, cores: Sequence[EngineCore], prepared: Sequence[None]) -> list[list[str]]:
        del prepared
        slot = cores[0].serving.adapters.find(self.adapter)
        made = self.build([core.serving.slots for core in cores], slot)
        pairs = zip(cores, made, strict=True)
        return [core.serving.differing_adapter(slots) for core, slots in pairs]

    def commit(self, core: EngineCore, prepared: list[str]) -> list[str]:
        del core
        return prepared

    def combine(self, answers: Sequence[list[str]]) -> list[str]:
        return sorted({name for answer in answers for name in answer})
