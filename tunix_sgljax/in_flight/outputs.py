"""Rollout outputs beyond Tunix's own fields, and a way to pass them around Tunix's cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
from tunix.rl.rollout.base_rollout import RolloutOutput

from sgljax_engine import InvalidRequestError


@dataclasses.dataclass
class VersionedRolloutOutput(RolloutOutput):
    """Tunix's RolloutOutput with the weights and the experts behind each token.

    Attributes:
        routed_experts: For each completion the experts of its prompt's and its own `tokens`, an
            array [tokens, layers, experts of a token], without the very last sampled token, which
            goes through none. None if they were not asked for. Tunix has the field after 0.1.7.
        weight_versions: For each completion an int32 array as long as its `tokens`: the engine's
            weight version that sampled each. They differ within a completion that was running
            during a weight update.
        sampling_masks: For each completion the int32 ids that each of its `tokens` was drawn from;
            None unless the rollout reports them. With them, `logprobs` are those over them.
        replica_ids: For each completion the server of a fleet that sampled it; None in process.
    """

    routed_experts: list[np.ndarray | None] | None = dataclasses.field(default=None, kw_only=True)
    weight_versions: list[np.ndarray] = dataclasses.field(kw_only=True)
    sampling_masks: list[list[np.ndarray]] | None = dataclasses.field(default=None, kw_only=True)
    replica_ids: list[str | None] | None = dataclasses.field(default=None, kw_only=True)

    def rows(self, part: slice) -> VersionedRolloutOutput:
        """The output of some completions."""

        def some(values: list[Any] | None) -> list[Any] | None:
            return None if values is None else values[part]

        assert self.left_padded_prompt_tokens is not None
        return VersionedRolloutOutput(
            text=self.text[part],
            logits=[],
            tokens=self.tokens[part],
            left_padded_prompt_tokens=self.left_padded_prompt_tokens[part],
            logprobs=some(self.logprobs),
            routed_experts=some(self.routed_experts),
            weight_versions=self.weight_versions[part],
            sampling_masks=some(self.sampling_masks),
            replica_ids=some(self.replica_ids),
        )


class OutputRecorder:
    """Keeps the outputs of a thread's calls for an outer caller.

    `RLCluster.generate` copies Tunix's own fields and drops all others, so its result has no weight
    versions. Thread-safe: each thread sees only its own outputs.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[VersionedRolloutOutput]]:
        """Yields the list that collects outputs of this thread inside the block."""
        outer = self._current()
        self._local.outputs = outputs = []
        try:
            yield outputs
        finally:
            self._local.outputs = outer

    def add(self, output: VersionedRolloutOutput) -> None:
        """Adds an output; drops it outside a `recording` block of this thread."""
        outputs = self._current()
        if outputs is not None:
            outputs.append(output)

    def _current(self) -> list[VersionedRolloutOutput] | None:
        return getattr(self._local, "outputs", None)  # a new thread's local has no attributes


class PreparedOutputs:
    """Outputs that a thread's next calls return, made before. Each thread has its own."""

    def __init__(self) -> None:
        self._local = threading.local()

    @contextlib.contextmanager
    def giving(self, output: VersionedRolloutOutput) -> Iterator[None]:
        """Gives out the rows of an output, in order, to this thread's calls inside the block."""
        self._local.output, self._local.num_given = output, 0
        try:
            yield
        finally:
            self._local.output = None

    def take(self, count: int) -> VersionedRolloutOutput | None:
        """The next `count` rows; None outside a `giving` block of this thread."""
        output: VersionedRolloutOutput | None = getattr(self._local, "output", None)
        if output is None:
            return None
        first = self._local.num_given
        left = len(output.tokens) - first
        if count > left:
            raise InvalidRequestError(
                f"generate is asked for {count} completions, and {left} are prepared"
            )
        self._local.num_given += count
        return output.rows(slice(first, first + count))
