"""What a rollout returns beyond Tunix's own fields, and how it gets past Tunix's cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator

import numpy as np
from tunix.rl.rollout.base_rollout import RolloutOutput


@dataclasses.dataclass
class VersionedRolloutOutput(RolloutOutput):
    """Tunix's RolloutOutput with the weights behind each token.

    Attributes:
        weight_versions: For each completion an int32 array as long as its `tokens`: the engine's
            weight version that sampled each. They differ within a completion that was running
            while weights were updated.
    """

    weight_versions: list[np.ndarray]


class OutputRecorder:
    """Keeps the outputs that a thread's calls produce, for whoever is above those calls.

    `RLCluster.generate` copies Tunix's own fields and drops all others, so what it returns has
    no weight versions. Thread-safe: each thread sees its own outputs only.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[VersionedRolloutOutput]]:
        """Gives the list to which outputs of this thread are added inside the block."""
        outer = self._current()
        self._local.outputs = outputs = []
        try:
            yield outputs
        finally:
            self._local.outputs = outer

    def add(self, output: VersionedRolloutOutput) -> None:
        """Takes an output; forgets it outside a `recording` block of this thread."""
        outputs = self._current()
        if outputs is not None:
            outputs.append(output)

    def _current(self) -> list[VersionedRolloutOutput] | None:
        return getattr(self._local, "outputs", None)  # a new thread's local has no attributes
