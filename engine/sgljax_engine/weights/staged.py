"""Weights that were made beside those that serve, and wait to be published or discarded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import jax

StagedState = Literal["staged", "published", "discarded"]


class StagedWeights:
    """A complete set of weights on the engine's devices that do not serve yet.

    See `Engine.stage_weights`. Only the engine that made them can publish them. They take the
    memory of one model until they are published, discarded or garbage-collected, or the engine is
    shut down. `sleep` does not move them. Any thread may read the properties.
    """

    def __init__(self, owner: object, weights: list[dict[str, jax.Array]]) -> None:
        """Takes weights of each engine that nobody else holds; the worker alone does this."""
        self._owner = owner
        self._weights = weights
        self._num_bytes = sum(weight.nbytes for each in weights for weight in each.values())
        self._state: StagedState = "staged"
        self._version: int | None = None

    @property
    def state(self) -> StagedState:
        """Staged, published or discarded; the last two are for ever."""
        return self._state

    @property
    def weight_version(self) -> int | None:
        """The version that they were published as; None before that."""
        return self._version

    @property
    def num_bytes(self) -> int:
        """What they take, or took, on the devices: bytes of all shards together."""
        return self._num_bytes

    def __repr__(self) -> str:
        """Says what became of them."""
        version = "" if self._version is None else f", weight_version={self._version}"
        return f"StagedWeights({self._state!r}, num_bytes={self._num_bytes}{version})"

    # ------------------------------------------------------------------ for the worker alone

    def is_of(self, owner: object) -> bool:
        """Whether they were made for this owner."""
        return self._owner is owner

    def build(self, olds: Sequence[Mapping[str, jax.Array]]) -> list[dict[str, jax.Array]]:
        """Hands them to the engine threads. They stay here too, in case the swap fails."""
        del olds
        return self._weights

    def published(self, version: int) -> None:
        """They serve: from now on only the engine holds them."""
        self._version, self._weights = version, []
        self._state = "published"

    def discard(self) -> bool:
        """Frees them now; False unless they were staged."""
        if self._state != "staged":
            return False
        self._state = "discarded"
        for weights in self._weights:
            for weight in weights.values():
                weight.delete()
        self._weights = []
        return True
