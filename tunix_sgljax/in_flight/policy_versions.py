"""Which policy a token comes from, and the lock around weight syncs of Tunix's agentic learners."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np

NO_VERSION = -1
"""Stands where no policy sampled a token: at the environment's tokens and at padding."""


class PolicyVersions:
    """Translates an engine's weight versions into a learner's policy versions.

    The two count from different starts (a restored learner begins at its global step) and at
    different rates: with `offload_to_cpu` Tunix also hands the weights over around its training
    steps. A version that no sync announced belongs to the sync before it, which is never too new.

    One thread may announce while others translate.
    """

    def __init__(self, engine_version: int, policy_version: int) -> None:
        """Begins with the weights that the engine has now."""
        self._known = (np.array([engine_version]), np.array([policy_version], np.int32))

    def announce(self, engine_version: int, policy_version: int) -> None:
        """From `engine_version` on, tokens come from `policy_version`."""
        engine, policy = self._known
        # Replaced as one, so that no reader sees half of it.
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


class SyncLock(Protocol):
    """What Tunix's orchestrator and learner ask of `tunix.rl.agentic.utils.RolloutSyncLock`."""

    def acquire_rollout(self) -> None:
        """Before an episode; on the asyncio loop's thread."""
        ...

    def release_rollout(self) -> None:
        """After an episode; on the asyncio loop's thread."""
        ...

    def acquire_weight_sync(self) -> None:
        """Before a weight sync; on the training thread."""
        ...

    def release_weight_sync(self) -> None:
        """After a weight sync; on the training thread."""
        ...


class InFlightSyncLock:
    """Serialises weight syncs and lets episodes begin, run and end meanwhile."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()

    def acquire_rollout(self) -> None:
        """Never blocks: Tunix calls it on the thread of its asyncio loop."""

    def release_rollout(self) -> None:
        """Nothing waits for episodes to end."""

    def acquire_weight_sync(self) -> None:
        """Waits for another weight sync only."""
        self._mutex.acquire()

    def release_weight_sync(self) -> None:
        """Lets the next weight sync begin."""
        self._mutex.release()


class AnnouncedSyncLock:
    """Another lock, with a call at the beginning of each weight sync.

    The call comes before the engine has the new weights, so that no token of theirs can be
    looked at too early.
    """

    def __init__(self, inner: SyncLock, announce: Callable[[], None]) -> None:
        self._inner = inner
        self._announce = announce

    def acquire_rollout(self) -> None:
        """See the inner lock."""
        self._inner.acquire_rollout()

    def release_rollout(self) -> None:
        """See the inner lock."""
        self._inner.release_rollout()

    def acquire_weight_sync(self) -> None:
        """See the inner lock; then announces the sync."""
        self._inner.acquire_weight_sync()
        self._announce()

    def release_weight_sync(self) -> None:
        """See the inner lock."""
        self._inner.release_weight_sync()
