"""Which policy a token comes from, and the lock around weight syncs of Tunix's agentic learners."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np

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
        """Starts with the engine's current weights."""
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


class SyncLock(Protocol):
    """The part of `tunix.rl.agentic.utils.RolloutSyncLock` that Tunix uses."""

    def acquire_rollout(self) -> None:
        """Called before an episode, on the asyncio loop's thread."""
        ...

    def release_rollout(self) -> None:
        """Called after an episode, on the asyncio loop's thread."""
        ...

    def acquire_weight_sync(self) -> None:
        """Called before a weight sync, on the training thread."""
        ...

    def release_weight_sync(self) -> None:
        """Called after a weight sync, on the training thread."""
        ...


class InFlightSyncLock:
    """Serialises weight syncs, and lets episodes begin, run and end during one."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()

    def acquire_rollout(self) -> None:
        """Never blocks: Tunix calls it on the thread of its asyncio loop."""

    def release_rollout(self) -> None:
        """Does nothing: no one waits for episodes to end."""

    def acquire_weight_sync(self) -> None:
        """Waits only for another weight sync."""
        self._mutex.acquire()

    def release_weight_sync(self) -> None:
        """Lets the next weight sync begin."""
        self._mutex.release()


class AnnouncedSyncLock:
    """Wraps another lock, with a call at the start of each weight sync.

    The call comes before the engine has the new weights, so that no one looks up their tokens too
    early.
    """

    def __init__(self, inner: SyncLock, announce: Callable[[], None]) -> None:
        self._inner = inner
        self._announce = announce

    def acquire_rollout(self) -> None:
        """Calls the inner lock."""
        self._inner.acquire_rollout()

    def release_rollout(self) -> None:
        """Calls the inner lock."""
        self._inner.release_rollout()

    def acquire_weight_sync(self) -> None:
        """Calls the inner lock, then announces the sync."""
        self._inner.acquire_weight_sync()
        self._announce()

    def release_weight_sync(self) -> None:
        """Calls the inner lock."""
        self._inner.release_weight_sync()
