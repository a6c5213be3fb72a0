"""Commands about LoRA adapters: swapping them between two dispatches, and looking at them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import jax

from sgljax_engine.core.commands.weights import Swap, Weights
from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.core.serving import ServingWeights
from sgljax_engine.core.transaction import GroupCommand
from sgljax_engine.errors import EngineStateError

BuildAdapter = Callable[[Sequence[Weights], int], Sequence[Weights]]
"""(A and B by name that serve in each engine, slot) -> the same with an adapter in its slot."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SwapAdapter(Swap):
    """Serve an adapter, a new one or in the place of one with its name.

    Attributes:
        adapter: Name of the adapter.
        build: Puts it into its slot.
        future: Gets the new weight version.
    """

    adapter: str
    build: BuildAdapter
    future: Future[int]

    def check(self, serving: ServingWeights) -> None:
        """Raises EngineStateError when there are no weights to be beside, or there is no slot."""
        if not serving.are_held:
            raise EngineStateError(
                "the engine has no weights to load an adapter beside: update_weights first"
            )
        serving.adapters.reserve(self.adapter)

    def make(self, serving: Sequence[ServingWeights]) -> list[dict[str, jax.Array]]:
        """The weights of each engine, with the adapter in its slot."""
        slot = serving[0].adapters.reserve(self.adapter)
        slots = self.build([each.slots for each in serving], slot)
        return [each.with_slots(new) for each, new in zip(serving, slots, strict=True)]

    def serve(self, serving: ServingWeights, made: Mapping[str, jax.Array]) -> int:
        """Serves it; returns its slot."""
        serving.swap(made)
        slot = serving.adapters.reserve(self.adapter)
        serving.adapters.add(self.adapter, slot)
        return slot


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class UnloadAdapter(GroupCommand):
    """Give an adapter's slot back."""

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
        """Gives the slot back."""
        core.pool.reset_cache(prepared)
        core.serving.adapters.remove(self.adapter)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CompareAdapter(GroupCommand):
    """Names of projections whose adapter differs from what a source makes of it.

    Attributes:
        adapter: Name of the adapter.
        build: See `SwapAdapter`.
        future: Gets the names.
    """

    adapter: str
    build: BuildAdapter
    future: Future[list[str]]

    def prepare(self, core: EngineCore) -> None:
        """Looks whether there are weights."""
        core.check_awake()

    def together(self, cores: Sequence[EngineCore], prepared: Sequence[None]) -> list[list[str]]:
        """Compares those of each engine."""
        del prepared
        slot = cores[0].serving.adapters.find(self.adapter)
        made = self.build([core.serving.slots for core in cores], slot)
        pairs = zip(cores, made, strict=True)
        return [core.serving.differing_adapter(slots) for core, slots in pairs]

    def commit(self, core: EngineCore, prepared: list[str]) -> list[str]:
        """What was found."""
        del core
        return prepared

    def combine(self, answers: Sequence[list[str]]) -> list[str]:
        """Those that differ in any engine."""
        return sorted({name for answer in answers for name in answer})
