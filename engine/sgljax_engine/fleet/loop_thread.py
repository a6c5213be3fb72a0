"""An event loop on a thread of its own, for callers of any thread and any loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from sgljax_engine.errors import EngineShutdownError

_T = TypeVar("_T")


class LoopThread:
    """Runs coroutines; a caller who is interrupted or cancelled cancels his."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Starts a coroutine; cancelling the future cancels it. Any thread."""
        if self._is_closed:
            coroutine.close()
            raise EngineShutdownError("the fleet's client was shut down")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Runs a coroutine and waits for its result. Any thread but the loop's."""
        future = self.start(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self, last: Coroutine[Any, Any, Any]) -> None:
        """Cancels what runs, runs a last coroutine, and ends the thread. Idempotent."""
        if self._is_closed:
            last.close()
            return

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await last

        ended = self.start(end())
        self._is_closed = True
        ended.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
