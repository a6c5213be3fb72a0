"""What a server is in a fleet: its id, the store that it follows, and whether it may serve."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from sgljax_engine import Engine
from sgljax_engine.fleet.follower import WeightFollower

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_FIRST_RETRY_S, _LAST_RETRY_S = 0.5, 30.0
"""Seconds between tries to reload weights; each wait is twice the one before."""

STALE, QUARANTINED = "stale_weights", "quarantined"
"""Codes of the reasons for which a server refuses requests that another server answers."""


class Replica:
    """One of the servers of a fleet. All methods run on the server's event loop.

    Attributes:
        id: Its name in replies and metrics.
        follower: What serves the versions of a store; None without one.
        num_quarantines: How often non-finite logits took it out of service.
        is_quarantined: Whether it is out of service.
    """

    def __init__(self, engine: Engine, replica_id: str, store: str | None) -> None:
        """Serves the newest version of the store, which may take long.

        Raises:
            EngineError: as `WeightFollower.catch_up`.
        """
        self.id = replica_id
        self.follower = None if store is None else WeightFollower(engine, store)
        self.num_quarantines = 0
        self.is_quarantined = False
        self._engine = engine
        self._work: asyncio.Task[None] | None = None
        if self.follower is not None:
            self.follower.catch_up()

    def refusal(self, min_weight_version: int | None = None) -> tuple[str, str] | None:
        """Why it does not serve a request, as a code and a message; None if it does.

        A replica that is behind begins to catch up with its store.
        """
        if self.follower is not None and self.follower.is_broken:
            self._quarantine("only a part of a version was loaded")
        if self.is_quarantined:
            return QUARANTINED, (
                f"replica {self.id} is quarantined until it has loaded its weights again, since a "
                "request's logits were NaN or infinite, or its weights were loaded in part"
            )
        serving = self._engine.weight_version
        if min_weight_version is None or serving >= min_weight_version:
            return None
        self._start()
        return STALE, (
            f"replica {self.id} serves weight version {serving}, and min_weight_version is "
            f"{min_weight_version}"
        )

    def found_nonfinite(self) -> None:
        """Leaves service until the newest version was loaded again; nothing without a store."""
        if self.follower is not None:
            self._quarantine("logits were NaN or infinite")

    def _quarantine(self, reason: str) -> None:
        if self.is_quarantined:
            return
        logger.error("replica %s is quarantined: %s", self.id, reason)
        self.is_quarantined = True
        self.num_quarantines += 1
        self._start()

    async def ask(self, work: Callable[[], _T]) -> _T:
        """Does a follower's work on a thread of its own, which no shutdown waits for."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()

        def resolve(result: _T | None, error: Exception | None) -> None:
            if future.cancelled():
                return
            if error is None:
                future.set_result(result)  # type: ignore[arg-type]
            else:
                future.set_exception(error)

        def run() -> None:
            result, error = None, None
            try:
                result = work()
            except Exception as failure:
                error = failure
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(resolve, result, error)

        threading.Thread(target=run, name="sgljax-weight-follower", daemon=True).start()
        return await future

    async def close(self) -> None:
        """Ends what it does beside requests, and frees what is staged."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)
        if self.follower is not None:
            await self.ask(self.follower.close)

    # ------------------------------------------------------------------ beside requests

    def _start(self) -> None:
        if self.follower is not None and (self._work is None or self._work.done()):
            self._work = asyncio.ensure_future(self._mend(self.follower))

    async def _mend(self, follower: WeightFollower) -> None:
        """Catches up with the store; in quarantine reloads its weights, until that succeeds."""
        wait_s = _FIRST_RETRY_S
        while True:
            is_reload = self.is_quarantined
            try:
                version = await self.ask(follower.reload if is_reload else follower.catch_up)
            except Exception:
                logger.exception("replica %s could not load its weights from the store", self.id)
                if self.is_quarantined and is_reload:
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, _LAST_RETRY_S)
            else:
                logger.info("replica %s serves weight version %d", self.id, version)
                self.is_quarantined &= not is_reload
            if not self.is_quarantined:
                return
