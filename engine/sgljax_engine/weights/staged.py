from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax

from sgljax_engine.errors import InvalidRequestError

StagedState = Literal["staged", "published", "discarded"]


class StagedWeights:
    """A complete set of weights on the engine's devices, not serving yet.

    See `Engine.stage_weights`. Only the engine that made them can publish them. They take the
    memory of one model until they are published, discarded or garbage-collected, or the engine is
    shut down. `sleep` does not move them. Any thread may read the properties.
    """

    def __init__(self, owner: object, weights: list[dict[str, jax.Array]]) -> None:
        """Takes each engine's weights, which nobody else holds. Only the worker calls it."""
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
        """The weights' version; None before they are published."""
        return self._version

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards on the devices, also after they were freed."""
        return self._num_bytes

    def __repr__(self) -> str:
        version = "" if self._version is None else f", weight_version={self._version}"
        return f"StagedWeights({self._state!r}, num_bytes={self._num_bytes}{version})"

    # ------------------------------------------------------------------ for the worker alone

    def is_of(self, owner: object) -> bool:
        """Whether this owner staged them."""
        return self._owner is owner

    def build(self, olds: Sequence[Mapping[str, jax.Array]]) -> list[dict[str, jax.Array]]:
        """Gives them to the engine threads. Keeps them too, in case the swap fails."""
        del olds
        return self._weights

    def published(self, version: int) -> None:
        """Notes that they serve; from now on only the engine holds them."""
        self._version, self._weights = version, []
        self._state = "published"

    def discard(self) -> bool:
        """Frees them now; returns False unless they were staged."""
        if self._state != "staged":
            return False
        self._state = "discarded"
        for weights in self._weights:
            for weight in weights.values():
                weight.delete()
        self._weights = []
        return True


def check_staged(staged: Any) -> None:
    if not isinstance(staged, StagedWeights):
        raise InvalidRequestError(f"staged must be StagedWeights, got {type(staged).__name__}")
