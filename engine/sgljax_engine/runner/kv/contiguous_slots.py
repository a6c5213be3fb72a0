"""Contents of contiguous KV after a decode dispatch, and whether the next can reuse them.

Copying the rows' pages takes several percent of a dispatch. If the same requests decode again in
the same rows, the copies and the tokens written since are still there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from sgljax_engine.cache.contiguous_kv import CHUNK
from sgljax_engine.runner.batches.batch import DecodeBatch
from sgljax_engine.types import Request


class ContiguousSlots:
    """Which requests the rows hold, and up to which token. Engine thread only.

    A request's pages change without its row only if it starts again or is prefilled; callers report
    that with `changed`. Any other code that takes or changes pages or rows must call `forget`.
    """

    def __init__(self) -> None:
        """Starts with empty rows."""
        # Ids keep no request alive. A new request with the same id must have started since.
        self._ids: list[int] = []
        self._num_rows = self._num_ready = 0

    def forget(self) -> None:
        """Makes the next dispatch copy everything."""
        self._ids, self._num_rows, self._num_ready = [], 0, 0

    def changed(self, requests: Iterable[Request]) -> None:
        """Forgets everything if any of these requests is in the rows."""
        if not {id(request) for request in requests}.isdisjoint(self._ids):
            self.forget()

    def place(self, requests: Sequence[Request], batch: DecodeBatch, num_steps: int) -> int:
        """Records a dispatch that is about to start; returns the number of chunks it need not copy.

        Args:
            requests: Requests of the first rows.
            batch: The batch, as numpy arrays.
            num_steps: Maximum number of steps of the dispatch.
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
