"""The data iterator of an over-sampling learner: prompts may be taken before their turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from tunix_sgljax.checkpoints.data_place import DataPlace
from tunix_sgljax.long_tail.columns import Columns, join_rows, split_rows

ROW = "over_sampling_row"
"""The column with each prompt's number in the data."""


class Row(NamedTuple):
    """A prompt: its number in the data, and its columns as a batch of one."""

    number: int
    columns: Columns


class PromptFeed:
    """Batches of the data for Tunix, whose prompts an over-sampling learner may take early.

    A prompt that was taken early may be owed: when the data is over, it comes in a batch, so that
    Tunix takes as many steps as without. One that is not is used up, and then batches end with the
    last whole one. Rows that an earlier process used are left out. One thread at a time.

    Attributes:
        place: Which rows are used.
    """

    def __init__(self, batches: Iterable[dict[str, Any]], place: DataPlace | None = None) -> None:
        self._batches = iter(batches)
        self.place = DataPlace() if place is None else place
        self._rows: deque[Row] = deque()
        self._given: dict[int, Row] = {}  # in batches, until someone asks for them
        self._owed: deque[Row] = deque()
        self._num_read = 0
        self._has_used_up = self.place.has_dropped
        self._batch_size: int | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        """The next batch, as large as the first one, with the column `ROW`."""
        if not self.has_batch() or self._batch_size is None:
            raise StopIteration
        rows = self._pop_rows(self._batch_size)
        while self._owed and len(rows) < self._batch_size:
            rows.append(self._owed.popleft())
        self._given.update((row.number, row) for row in rows)
        numbers = np.array([row.number for row in rows])
        return join_rows([row.columns for row in rows]) | {ROW: numbers}

    def pop(self, number: int) -> Row:
        """A row of a batch, by its number; once."""
        return self._given.pop(number)

    def has_batch(self) -> bool:
        """Whether there is a next batch; reads its rows."""
        while (self._batch_size is None or len(self._rows) < self._batch_size) and self._read():
            pass
        num_rows = len(self._rows) + len(self._owed)
        is_short = self._batch_size is None or num_rows < self._batch_size
        return num_rows > 0 and not (self._has_used_up and is_short)

    def take_early(self, count: int, *, is_owed: bool) -> list[Row]:
        """Up to `count` of the next prompts; owed ones come in a batch once the data is over."""
        rows = self._pop_rows(count)
        if is_owed:
            self._owed.extend(rows)
        elif rows:
            self._has_used_up = True
        return rows

    def _pop_rows(self, count: int) -> list[Row]:
        while len(self._rows) < count and self._read():
            pass
        return [self._rows.popleft() for _ in range(min(count, len(self._rows)))]

    def _read(self) -> bool:
        batch = next(self._batches, None)
        if batch is None:
            self.place.end()
            return False
        rows = split_rows(batch)
        if self._batch_size is None:
            self._batch_size = len(rows)
        for columns in rows:
            if self._num_read not in self.place:
                self._rows.append(Row(self._num_read, columns))
            self.place.read(columns["prompts"][0])
            self._num_read += 1
        return True
