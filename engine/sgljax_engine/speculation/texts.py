"""The tokens of a request as an array that grows with it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

MATCHED_TOKENS = 8
"""A match counts up to this many last tokens.

A reference begins with as many of the prompt, so that the first token is drafted too.
"""

PromptKey = bytes


class RequestText:
    """Prompt and output of a request. Its engine's thread updates it, any thread may read it."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        prompt = np.asarray(prompt_ids, np.int32)
        self.key: PromptKey = hashlib.blake2b(prompt.tobytes(), digest_size=16).digest()
        self._num_prompt = self._size = len(prompt)
        self._tokens = np.concatenate([prompt, np.zeros(len(prompt) // 2 + 64, np.int32)])

    def update(self, output_ids: Sequence[int]) -> None:
        """Takes the output tokens that came since, of all."""
        new = output_ids[self._size - self._num_prompt :]
        end = self._size + len(new)
        if end > len(self._tokens):  # a new array: who reads the old one goes on
            self._tokens = np.concatenate([self._tokens, np.zeros(end, np.int32)])
        self._tokens[self._size : end] = new
        self._size = end

    @property
    def tokens(self) -> np.ndarray:
        """int32, all of them; never changed in place."""
        size = self._size  # first, since the array may be replaced by a longer one
        return self._tokens[:size]

    @property
    def reference(self) -> np.ndarray:
        """int32, the end of the prompt and the output; never changed in place."""
        size = self._size  # as above
        return self._tokens[max(self._num_prompt - MATCHED_TOKENS, 0) : size]

    @property
    def num_output(self) -> int:
        return self._size - self._num_prompt
