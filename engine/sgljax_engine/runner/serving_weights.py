"""The serving weights: their version, their checksums, adapters, and why there are none.

Engine thread only, unless a method says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax

from sgljax_engine.errors import EngineStateError, InvalidRequestError
from sgljax_engine.runner.kv.host_arrays import to_device
from sgljax_engine.runner.runner import ModelRunner
from sgljax_engine.runner.sleep import SleepManager
from sgljax_engine.types import NO_ADAPTER
from sgljax_engine.weights.adapters import slots_of
from sgljax_engine.weights.checksum import WeightsDigest


class AdapterRegistry:
    """Names of loaded adapters, each with a slot of its own."""

    def __init__(self, max_loras: int, loaded: tuple[str, ...] = ()) -> None:
        self._max_loras = max_loras
        self._slots: dict[str, int] = {name: slot for slot, name in enumerate(loaded)}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of loaded adapters, in the order of loading."""
        return tuple(self._slots)

    def find(self, name: str | None) -> int:
        """The slot of an adapter; `NO_ADAPTER` for None."""
        if name is None:
            return NO_ADAPTER
        if name not in self._slots:
            known = ", ".join(map(repr, self._slots)) or "none"
            raise InvalidRequestError(f"lora {name!r} is not loaded; loaded: {known}")
        return self._slots[name]

    def reserve(self, name: str) -> int:
        """The slot that an adapter has or would get; raises EngineStateError when all are taken."""
        if name in self._slots:
            return self._slots[name]
        free = sorted(set(range(self._max_loras)) - set(self._slots.values()))
        if not free:
            raise EngineStateError(
                f"adapter {name!r} finds no slot: max_loras is {self._max_loras}, taken by "
                f"{', '.join(map(repr, self._slots)) or 'none'}; unload one"
            )
        return free[0]

    def add(self, name: str, slot: int) -> None:
        self._slots[name] = slot

    def remove(self, name: str) -> None:
        del self._slots[name]

    def clear(self) -> None:
        """Forgets all adapters, after the slots' contents were lost."""
        self._slots.clear()


class ServingWeights:
    """The weights of a runner, on the devices or asleep on the host.

    `problem` says why there are none until an update succeeds; None if there are.
    """

    def __init__(
        self, runner: ModelRunner, sleep_manager: SleepManager, adapters: AdapterRegistry
    ) -> None:
        self._runner = runner
        self._sleep_manager = sleep_manager
        self._digest: tuple[int, WeightsDigest] | None = None
        self.adapters = adapters
        self.problem: str | None = None

    @property
    def version(self) -> int:
        return self._runner.weight_version

    @property
    def are_held(self) -> bool:
        return bool(self._runner.weights) or self._sleep_manager.keeps_weights

    def check(self) -> None:
        if self.problem is not None:
            raise EngineStateError(
                f"the engine has no weights until update_weights succeeds: {self.problem}"
            )

    # ------------------------------------------------------------------ updates

    def swap(self, made: Mapping[str, jax.Array], version: int) -> None:
        """Serves other arrays from the next dispatch on, as a version.

        Sleeping weights are awake afterwards.
        """
        self._runner.swap_weights(made)
        self._sleep_manager.weights_came()
        self._runner.weight_version = version
        self._digest = None
        self.problem = None

    def were_lost(self, problem: str) -> None:
        """Notes that a donating update failed half-way: there are no weights."""
        self.problem = problem
        self._runner.swap_weights({})
        self._digest = None
        self.adapters.clear()

    @property
    def on_device(self) -> dict[str, jax.Array]:
        """The weights on the devices; empty while they sleep."""
        return self._runner.weights

    @property
    def sleep_on_host(self) -> bool:
        """Whether the weights sleep and are kept on the host."""
        return self._sleep_manager.keeps_weights

    def with_adapters(self, weights: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """New weights with the serving adapters, wherever those are."""
        return dict(weights) | (self.slots or self._runner.empty_slots())

    def with_slots(self, slots: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The serving weights, on the devices, with other adapters, or OffloadError."""
        return (self._runner.weights or self._sleep_manager.load_weights()) | dict(slots)

    @property
    def slots(self) -> dict[str, jax.Array]:
        """The adapters' A and B on the devices; copied there if the weights sleep."""
        asleep = self._sleep_manager.kept_weights
        return slots_of(self._runner.weights) or to_device(slots_of(asleep))

    def differing_adapter(self, made: Mapping[str, jax.Array]) -> list[str]:
        """Names of projections whose A or B differs from what was made for an adapter's slot."""
        serving = slots_of(self._runner.weights)
        differing = [each for each, x in made.items() if not bool((x == serving[each]).all())]
        return sorted({each.rsplit(".", 1)[0] for each in differing})

    # ------------------------------------------------------------------ sleep and checkpoints

    def were_given_up(self) -> None:
        self.problem = self.problem or "sleep(level=2) gave them up"

    def forget_unmade_digest(self) -> None:
        """Drops checksums that nobody asked for: they would keep the weights alive."""
        if self._digest is not None and not self._digest[1].is_made:
            self._digest = None

    def release(self) -> None:
        """Drops all checksums; for an engine that ends."""
        self._digest = None

    @property
    def digest(self) -> WeightsDigest:
        """Digest of the serving weights: one object for each version that is known."""
        if self._digest is None or self._digest[0] != self.version:
            if not self.are_held:
                return WeightsDigest(None)
            asleep = self._sleep_manager.kept_weights
            digest = WeightsDigest(self._runner.checksum_weights(asleep))
            self._digest = (self.version, digest)
        return self._digest[1]

    def raise_version(self, version: int) -> None:
        """Gives the serving weights this version, if it is higher than theirs."""
        if version > self.version:
            if self._digest is not None and self._digest[0] == self.version:
                self._digest = (version, self._digest[1])
            self._runner.weight_version = version
