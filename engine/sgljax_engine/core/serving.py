"""The weights that serve: their version, their checksums, adapters, and why there are none.

Engine thread only, but for what says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax

from sgljax_engine.core.adapters import AdapterRegistry
from sgljax_engine.core.sleep import SleepManager
from sgljax_engine.errors import EngineStateError
from sgljax_engine.runner.host_arrays import to_device
from sgljax_engine.runner.runner import ModelRunner
from sgljax_engine.weights.adapters import slots_of
from sgljax_engine.weights.digest import WeightsDigest


class ServingWeights:
    """What a runner computes with, on the devices or asleep on the host.

    Attributes:
        adapters: Names and slots of the adapters that are among the weights.
        problem: Why there are no weights until an update succeeds; None if there are.
    """

    def __init__(
        self, runner: ModelRunner, sleep_manager: SleepManager, adapters: AdapterRegistry
    ) -> None:
        """Serves what the runner has.

        Args:
            runner: Has the weights on the devices, and their version.
            sleep_manager: Has those that sleep.
            adapters: Those that the weights hold.
        """
        self._runner = runner
        self._sleep_manager = sleep_manager
        self._digest: tuple[int, WeightsDigest] | None = None
        self.adapters = adapters
        self.problem: str | None = None

    @property
    def version(self) -> int:
        """0 for the first weights. Any thread."""
        return self._runner.weight_version

    @property
    def are_held(self) -> bool:
        """Whether there are weights, on the devices or on the host."""
        return bool(self._runner.weights) or self._sleep_manager.keeps_weights

    def check(self) -> None:
        """Raises EngineStateError when weights were lost or given up."""
        if self.problem is not None:
            raise EngineStateError(
                f"the engine has no weights until update_weights succeeds: {self.problem}"
            )

    # ------------------------------------------------------------------ updates

    def swap(self, made: Mapping[str, jax.Array]) -> None:
        """Serves other arrays from the next dispatch on. Sleeping weights are awake afterwards."""
        self._runner.swap_weights(made)
        self._sleep_manager.weights_came()
        self._runner.weight_version += 1
        self._digest = None
        self.problem = None

    def were_lost(self, problem: str) -> None:
        """A donating update failed half-way."""
        self.problem = problem
        self._runner.swap_weights({})
        self._digest = None
        self.adapters.clear()

    @property
    def on_device(self) -> dict[str, jax.Array]:
        """The weights on the devices, none while they sleep."""
        return self._runner.weights

    @property
    def sleep_on_host(self) -> bool:
        """Whether the weights sleep, and are kept."""
        return self._sleep_manager.keeps_weights

    def with_adapters(self, weights: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """New weights with the adapters that serve, wherever those are."""
        return dict(weights) | (self.slots or self._runner.empty_slots())

    def with_slots(self, slots: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The weights that serve, on the devices, with other adapters.

        Raises:
            OffloadError: when the devices have no memory for weights that sleep.
        """
        return (self._runner.weights or self._sleep_manager.load_weights()) | dict(slots)

    @property
    def slots(self) -> dict[str, jax.Array]:
        """The adapters' A and B on the devices, where weights that sleep have them on the host."""
        asleep = self._sleep_manager.kept_weights
        return slots_of(self._runner.weights) or to_device(slots_of(asleep))

    def differing_adapter(self, made: Mapping[str, jax.Array]) -> list[str]:
        """Names of projections whose A or B is not what was made for an adapter's slot."""
        serving = slots_of(self._runner.weights)
        differing = [each for each, x in made.items() if not bool((x == serving[each]).all())]
        return sorted({each.rsplit(".", 1)[0] for each in differing})

    # ------------------------------------------------------------------ sleep and checkpoints

    def were_given_up(self) -> None:
        """`sleep(level=2)` gave them up. An update that lost them before stays the reason."""
        self.problem = self.problem or "sleep(level=2) gave them up"

    def forget_unmade_digest(self) -> None:
        """Lets go of checksums that nobody has asked for: they would keep the weights."""
        if self._digest is not None and not self._digest[1].is_made:
            self._digest = None

    def release(self) -> None:
        """Lets go of all checksums; for an engine that ends."""
        self._digest = None

    @property
    def digest(self) -> WeightsDigest:
        """Of the weights that serve: one object for each version that is known."""
        if self._digest is None or self._digest[0] != self.version:
            if not self.are_held:
                return WeightsDigest(None)
            asleep = self._sleep_manager.kept_weights
            digest = WeightsDigest(self._runner.checksum_weights(asleep))
            self._digest = (self.version, digest)
        return self._digest[1]

    def raise_version(self, version: int) -> None:
        """Calls the weights that serve by a higher version, if it is higher."""
        if version > self.version:
            if self._digest is not None and self._digest[0] == self.version:
                self._digest = (version, self._digest[1])
            self._runner.weight_version = version
