"""How fast steps of each size are on this machine, and which to take next. Engine thread only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

_RATE = 0.2
"""How far one dispatch moves the time of its size."""

_MARGIN = 1.05
"""How much faster drafts must be: they take more of the host."""

_FIRST_TRIALS = 2
"""Dispatches of each size at the start."""

_TRIAL_EVERY, _MAX_TRIAL_EVERY = 32, 256
"""Dispatches after which a size is tried again; twice as many after each vain trial."""


@dataclasses.dataclass
class _Size:
    seconds: float = 0.0
    num_trials: int = 0
    wait: int = _TRIAL_EVERY
    due: int = 0


class Speeds:
    """Seconds for a token of each row, by the number of tokens of a row in a step.

    A multi-armed bandit: the fastest size is taken, and the others are tried now and then. The
    first size is without drafts.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = {size: _Size() for size in sizes}
        self._plain = sizes[0]
        self._count = 0

    def pick(self) -> int:
        for size, known in self._sizes.items():
            if known.num_trials < _FIRST_TRIALS or known.due <= self._count:
                return size
        return self.best

    @property
    def best(self) -> int:
        """The fastest size so far."""
        handicap = {size: _MARGIN if size != self._plain else 1.0 for size in self._sizes}
        return min(self._sizes, key=lambda size: self._sizes[size].seconds * handicap[size])

    def is_trial(self, size: int) -> bool:
        """Whether a dispatch of that size is to find out how fast it is."""
        return self._sizes[size].num_trials < _FIRST_TRIALS or size != self.best

    def learn(self, size: int, seconds: float) -> None:
        """Takes the time of a dispatch of that size, divided by the mean tokens of a row."""
        known, was_best = self._sizes[size], self.best
        self._count += 1
        known.num_trials += 1
        is_first = known.num_trials <= _FIRST_TRIALS
        rate = 1 / known.num_trials if is_first else _RATE if size == was_best else 0.5
        known.seconds += rate * (seconds - known.seconds)
        if size == self.best:
            known.wait = _TRIAL_EVERY
        elif not is_first:
            known.wait = min(2 * known.wait, _MAX_TRIAL_EVERY)
        known.due = self._count + known.wait
