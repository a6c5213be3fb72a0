"""Which policy a token comes from, and the lock around weight syncs of Tunix's agentic learners."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tunix.rl.agentic.utils import RolloutSyncLock

NO_VERSION = -1
"""Marks tokens that no policy sampled: the environment's tokens and padding."""


class PolicyVersions:
    """Translates an engine's weight versions into a learner's policy versions.

    The two count from different starts (a restored learner begins at its global step) and at
    different rates: with `offload_to_cpu` Tunix also passes the weights around its training steps.
    A version that no sync announced belongs to the previous sync, which is never too new.

    One thread may call `announce` while others call `translate`.
    """

    def __init__(self, engine_version: int, policy_version: int) -> None:
        self._known = (np.array([engine_version]), np.array([policy_version], np.int32))

    def announce(self, engine_version: int, policy_version: int) -> None:
        """Records that tokens from `engine_version` on come from `policy_version`."""
        engine, policy = self._known
        # Replaced atomically, so that no reader sees half of it.
        self._known = (
            np.append(engine, engine_version),
            np.append(policy, np.int32(policy_version)),
        )

    def translate(self, engine_versions: np.ndarray) -> np.ndarray:
        """Policy versions, int32, of the same shape; `NO_VERSION` stays."""
        engine, policy = self._known
        places = np.searchsorted(engine, engine_versions, side="right") - 1
        return np.where(
            engine_versions == NO_VERSION, np.int32(NO_VERSION), policy[np.maximum(places, 0)]
        )


class AnnouncedSyncLock(RolloutSyncLock):
    """Tunix's lock of an agentic learner, with a call at the start of each weight sync.

    The call comes before the engine has the new weights, so that no one looks up their tokens too
    early. In flight, episodes begin, run and end during a sync, which waits only for another one.
    """

    def __init__(self, announce: Callable[[], None], *, is_in_flight: bool) -> None:
        super().__init__()
        self._announce = announce
        self._is_in_flight = is_in_flight

    def acquire_rollout(self) -> None:
        """Never blocks in flight: Tunix calls it on the thread of its asyncio loop."""
        if not self._is_in_flight:
            super().acquire_rollout()

    def release_rollout(self) -> None:
        if not self._is_in_flight:
            super().release_rollout()

    def acquire_weight_sync(self) -> None:
        super().acquire_weight_sync()
        self._announce()
