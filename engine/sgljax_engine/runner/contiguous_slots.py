"""What the last decode dispatch left in the decode rows, and whether the next can go on with it.

Copying the rows' pages takes several percent of a dispatch. If the same requests decode again in
the same rows, what was copied, and what the steps wrote since, is still there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from sgljax_engine.cache.contiguous_kv import CHUNK
from sgljax_engine.runner.batch import DecodeBatch
from sgljax_engine.types import Request


class ContiguousSlots:
    """Which requests the rows hold, and how far. Engine thread only.

    What is in a request's pages changes behind its rows only if it starts again or is prefilled, of
    which `changed` hears. Whatever else takes or changes pages or rows must `forget`.
    """

    def __init__(self) -> None:
        """Nothing is in the rows."""
        # Ids keep no request alive. Another one with the same id has started since.
        self._ids: list[int] = []
        self._num_rows = self._num_ready = 0

    def forget(self) -> None:
        """The next dispatch copies everything."""
        self._ids, self._num_rows, self._num_ready = [], 0, 0

    def changed(self, requests: Iterable[Request]) -> None:
        """Forgets everything if any of these is in the rows."""
        if not {id(request) for request in requests}.isdisjoint(self._ids):
            self.forget()

    def place(self, requests: Sequence[Request], batch: DecodeBatch, num_steps: int) -> int:
        """Notes a dispatch that is about to start; returns the chunks that it need not copy.

        Args:
            requests: Of the first rows.
            batch: Of numpy arrays.
            num_steps: That it takes at most.
        """
        ids, num_rows = [id(request) for request in requests], len(batch.input_ids)
        limits = np.asarray(batch.step_limits)
        is_same = ids == self._ids and num_rows == self._num_rows
        num_ready = self._num_ready if is_same else 0
        ends = np.where(limits > 0, batch.positions + np.minimum(limits, num_steps), 0)
        self._ids, self._num_rows = ids, num_rows
        self._num_ready = max(num_ready, -(-int(ends.max()) // CHUNK))
        if np.any(limits[: len(ids)] == 0):
            self.forget()  # rows that take no step are not copied
        return num_ready
