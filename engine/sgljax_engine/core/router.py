"""Temporary."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from sgljax_engine.types import Request


class Router:
    def __init__(self, num_engines: int, block_size: int, max_rows: int) -> None:
        self._loads = [0] * num_engines
        self._lock = threading.RLock()
        self._known: dict[tuple[int, ...], int] = {}

    def route(self, requests: Sequence[Request]) -> list[int]:
        out = []
        with self._lock:
            for r in requests:
                key = tuple(r.prompt_ids)
                at = self._known.get(key)
                if at is None:
                    at = self._loads.index(min(self._loads))
                    self._known[key] = at
                self._loads[at] += 1
                out.append(at)
        return out

    def finished(self, request: Request) -> None:
        with self._lock:
            self._loads[request.engine] -= 1

    has_free_rows = False
