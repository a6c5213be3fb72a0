"""Seeds of random draws."""

from __future__ import annotations

import random
import threading

from sgljax_engine.sampling_params import MAX_SEED

_MASK = (1 << 64) - 1


class SeedSource:
    """Gives fresh seeds to requests without one. Thread-safe."""

    def __init__(self, seed: int | None) -> None:
        """Starts from a seed, or from the operating system's entropy."""
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._num_drawn = 0

    @property
    def num_drawn(self) -> int:
        """Seeds given or skipped so far."""
        return self._num_drawn

    def fresh(self) -> int:
        """A seed in [0, MAX_SEED]."""
        with self._lock:
            self._num_drawn += 1
            return self._random.randint(0, MAX_SEED)

    def skip_to(self, num_drawn: int) -> None:
        """Skips seeds until so many are drawn; nothing if they are already."""
        while self._num_drawn < num_drawn:
            self.fresh()


def derive_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request; sample 0 keeps the request's own.

    Mixes with the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).

    Args:
        seed: The request's seed, in [0, 2**63 - 1]; of a negative one, the lower 63 bits count.
        index: Index of the sample, >= 0.

    Returns:
        A seed in [0, 2**63 - 1].
    """
    if index == 0:
        return seed & MAX_SEED
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) & MAX_SEED
