from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from tunix.rl.rollout.base_rollout import RolloutConfig

T = TypeVar("T")

_MAX_ENTRIES = 8
_READ_EACH_TIME = {"seed": None, "rollout_mapping_config": None}
"""Fields that hold arrays or functions, which only their identity describes."""
_IMMUTABLE = (bool, int, float, complex, str, bytes, type, type(None), np.generic, np.dtype)


class _Entry(NamedTuple, Generic[T]):
    fields: dict[str, Any]
    value: T


class ConfigMemory(Generic[T]):
    """Values read from configs, by the content of all their fields. Any thread.

    Tunix passes the same config at each call, and an agentic learner equal ones; reading one takes
    hundreds of Python calls. A RolloutConfig is mutable, so its fields are compared, in one call.
    """

    def __init__(self) -> None:
        self._entries: tuple[_Entry[T], ...] = ()

    def get(self, config: RolloutConfig, read: Callable[[], T], **more: Any) -> T:
        """The value of a config with the same fields, else that of `read`.

        A config with a field whose changes cannot be seen, such as an array, is always read. Values
        must not depend on its `seed` and `rollout_mapping_config`; `more` is what they depend on
        beside it.
        """
        fields = {**vars(config), **_READ_EACH_TIME, **more}
        for entry in self._entries:
            try:
                if entry.fields == fields:
                    return entry.value
            except ValueError:  # an array, which has no truth value
                break
        value = read()
        try:
            kept = _Entry(_copy(fields), value)
        except TypeError:
            return value
        self._entries = (kept, *self._entries[: _MAX_ENTRIES - 1])
        return value

    def clear(self) -> None:
        self._entries = ()


def _copy(value: Any) -> Any:
    """Copies containers; TypeError for a value that may change unseen."""
    if isinstance(value, _IMMUTABLE):
        return value
    if type(value) is dict:
        return {key: _copy(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copy, value))
    raise TypeError(f"{type(value).__name__} may change unseen")
