"""Which tokens a request has seen, updated as it grows. Host-only; no JAX."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class TokenCounts:
    """The distinct tokens of a prompt and its output, and how often the output has each.

    The constructor reads the prompt once; each `update` then reads only the new tokens.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._places = {token: index for index, token in enumerate(dict.fromkeys(prompt_ids))}
        self._ids = np.fromiter(self._places, np.int32, len(self._places))
        self._counts = np.zeros(len(self._ids), np.int32)
        self._num_counted = 0

    def __len__(self) -> int:
        return len(self._places)

    @property
    def ids(self) -> np.ndarray:
        """The tokens, int32 [len(self)], each once; a view."""
        return self._ids[: len(self)]

    @property
    def counts(self) -> np.ndarray:
        """Their occurrences in the output, int32 [len(self)]; a view."""
        return self._counts[: len(self)]

    def update(self, output_ids: Sequence[int]) -> None:
        for token in output_ids[self._num_counted :]:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._ids):
                self._ids = np.append(self._ids, np.zeros_like(self._ids, shape=place + 16))
                self._counts = np.append(
                    self._counts, np.zeros_like(self._counts, shape=place + 16)
                )
            self._ids[place] = token
            self._counts[place] += 1
        self._num_counted = len(output_ids)
