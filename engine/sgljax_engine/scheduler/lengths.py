"""Lengths of answers: what is known of a prompt before its next answer ends.

Samples of a prompt have similar lengths. So a prompt's earlier answers, the finished samples of its
group, and the tokens of those that still run tell how long another sample takes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

_MAX_LENGTHS = 16
"""Lengths that are kept of one prompt, as many as the drafters keep answers."""

_MAX_PROMPTS = 1 << 16
"""Prompts of which lengths are kept; the one that was answered the longest time ago goes first."""

_MEAN_RATE = 1 / 256
"""How far one answer moves the mean of all."""

_OUTLIVED = 1.5
"""Expected length of a request that is longer than expected, in multiples of its tokens so far."""


class AnswerLengths:
    """Lengths of finished answers, by prompt. Engines of a group share it; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lengths: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._mean: float | None = None

    def add(self, prompt_key: int, num_tokens: int) -> None:
        """Notes the length of an answer."""
        with self._lock:
            known = self._lengths.pop(prompt_key, ())
            self._lengths[prompt_key] = (*known, num_tokens)[-_MAX_LENGTHS:]
            if len(self._lengths) > _MAX_PROMPTS:
                self._lengths.popitem(last=False)
            mean = num_tokens if self._mean is None else self._mean
            self._mean = mean + (num_tokens - mean) * _MEAN_RATE

    def is_known(self, prompt_key: int) -> bool:
        with self._lock:
            return prompt_key in self._lengths

    def expected(self, prompt_key: int, running: Sequence[int] = ()) -> float:
        """Expected output tokens of another sample of a prompt.

        The mean of all answers counts as one of the prompt's. A sample that runs counts as at least
        as long as it is. Nothing known gives 0.
        """
        with self._lock:
            known, mean = self._lengths.get(prompt_key, ()), self._mean or 0.0
        total, count = mean + sum(known), 1 + len(known)
        least = total / count
        total += sum(max(tokens, least) for tokens in running)
        return total / (count + len(running))


def expected_remaining(expected: float, num_tokens: int, num_remaining: int) -> float:
    """Expected tokens that a request still generates."""
    return min(max(expected, _OUTLIVED * num_tokens) - num_tokens, num_remaining)
