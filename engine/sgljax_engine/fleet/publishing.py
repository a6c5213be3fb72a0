"""Brings new weights from a trainer to the workers of a fleet: written, staged, published."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from sgljax_engine.fleet.client import STATUS, FleetClient, Reply, problems
from sgljax_engine.fleet.config import PAIRS, FleetConfig, FleetError
from sgljax_engine.fleet.loop_thread import LoopThread
from sgljax_engine.fleet.reader import VersionReader
from sgljax_engine.fleet.writer import VersionWriter, WrittenVersion
from sgljax_engine.io_struct import PauseMode

logger = logging.getLogger(__name__)

_DAMAGED = f"{STATUS}503 weight_store"
_ENDING = f"{STATUS}503"
_RETRY_S = 1.0
"""Seconds until a version is handed out again, where too few workers could be reached."""


class WeightsPublisher:
    """Writes versions of the weights and has the workers serve them. One call at a time.

    Whoever cannot is left out: it serves an older version, so requests pass it by until it has
    caught up by itself.

    Attributes:
        version: Newest version that enough workers served; 0 before the first.
        written: What the last call wrote; None before.
    """

    def __init__(self, config: FleetConfig, client: FleetClient, loop: LoopThread) -> None:
        self._config, self._client, self._loop = config, client, loop
        self._writer = VersionWriter(config.weights_store, base_every=config.base_every)
        self.version = 0
        self.written: WrittenVersion | None = None

    def publish(
        self, tensors: Mapping[str, np.ndarray], adapter: Mapping[str, Any] | None, mode: PauseMode
    ) -> int:
        """Has the workers serve tensors; returns their version.

        Where too few workers are there, it waits for them.

        Raises:
            FleetError: when fewer than `min_workers` serve them, at once where some refuse them and
                else after `outage_timeout_s`; names each and its answer.
            WeightStoreError: when the version cannot be written.
        """
        self.written = self._writer.write(tensors, adapter=adapter)
        replies = self._loop.run(self._hand_out_in_outage(self.written.version, mode))
        if any(reply.problem and reply.problem.startswith(_DAMAGED) for reply in replies):
            # What was written does not arrive: whole, and under a name that nobody has seen.
            logger.warning("writing the weights whole: %s", problems(replies))
            self.written = self._writer.write(tensors, adapter=adapter, as_base=True)
            replies = self._loop.run(self._hand_out_in_outage(self.written.version, mode))
        num_serving = sum(reply.problem is None for reply in replies)
        if num_serving < self._config.min_workers:
            raise FleetError(
                f"version {self.written.version} of the weights is served by {num_serving} of "
                f"{len(replies)} workers, min_workers is {self._config.min_workers}: "
                f"{problems(replies) or 'the fleet has no other'}"
            )
        if num_serving < len(replies):
            logger.warning(
                "left out until they have version %d of the weights: %s",
                self.written.version,
                problems(replies),
            )
        self.version = self.written.version
        return self.version

    def differing(self, tensors: Mapping[str, np.ndarray]) -> list[str]:
        """Names of tensors that differ in bits from the version that is served.

        Those of an adapter are compared with its, those of a model with the model's.
        """
        are_pairs = any(name.startswith(PAIRS) for name in tensors)
        served = {
            name: array
            for name, array in VersionReader(self._config.weights_store)
            .read(self.version)
            .tensors.items()
            if name.startswith(PAIRS) == are_pairs
        }
        return sorted(
            name
            for name in served.keys() | tensors.keys()
            if name not in served or name not in tensors or not _same(served[name], tensors[name])
        )

    async def _hand_out_in_outage(self, version: int, mode: PauseMode) -> list[Reply]:
        """`_hand_out` until enough workers serve, one refuses, or an outage was too long."""
        ends_s = time.monotonic() + self._config.outage_timeout_s
        is_told = False
        while True:
            replies = await self._hand_out(version, mode)
            num_serving = sum(reply.problem is None for reply in replies)
            is_refused = any(reply.problem and not _is_away(reply.problem) for reply in replies)
            is_over = is_refused or time.monotonic() >= ends_s
            if num_serving >= self._config.min_workers or is_over:
                return replies
            if not is_told:
                logger.warning(
                    "version %d of the weights waits for workers: %s",
                    version,
                    problems(replies) or "the fleet has none",
                )
                is_told = True
            await asyncio.sleep(_RETRY_S)

    async def _hand_out(self, version: int, mode: PauseMode) -> list[Reply]:
        """Stages on all workers, and then publishes on those that could."""
        limit_s, body = self._config.sync_timeout_s, {"version": version}
        urls = await self._client.worker_urls()
        staged = await self._client.tell(urls, "/stage_weight_version", body, limit_s)
        ready = [reply.url for reply in staged if reply.problem is None]
        body |= {"mode": mode}
        published = await self._client.tell(ready, "/publish_weight_version", body, limit_s)
        return published + [reply for reply in staged if reply.problem is not None]


def _is_away(problem: str) -> bool:
    """Whether a worker could not be reached, or is about to end: it may be there again soon."""
    is_ending = problem.startswith(_ENDING) and not problem.startswith(_DAMAGED)
    return is_ending or not problem.startswith(STATUS)


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    is_alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return is_alike and one.tobytes() == other.tobytes()
