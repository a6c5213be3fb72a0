"""Which adapters an engine holds, and in which slots. Engine thread only; imports no JAX."""

from __future__ import annotations

from sgljax_engine.errors import EngineStateError, InvalidRequestError
from sgljax_engine.types import NO_ADAPTER


class AdapterRegistry:
    """Names of loaded adapters, each with a slot of its own."""

    def __init__(self, max_loras: int, loaded: tuple[str, ...] = ()) -> None:
        """Starts with loaded adapters in the first slots.

        Args:
            max_loras: Slots; 0 for an engine without adapters.
            loaded: Names of the loaded adapters; at most `max_loras`.
        """
        self._max_loras = max_loras
        self._slots: dict[str, int] = {name: slot for slot, name in enumerate(loaded)}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of loaded adapters, in the order of loading."""
        return tuple(self._slots)

    def find(self, name: str | None) -> int:
        """The slot of an adapter; `NO_ADAPTER` for None.

        Raises:
            InvalidRequestError: for an adapter that is not loaded.
        """
        if name is None:
            return NO_ADAPTER
        if name not in self._slots:
            known = ", ".join(map(repr, self._slots)) or "none"
            raise InvalidRequestError(f"lora {name!r} is not loaded; loaded: {known}")
        return self._slots[name]

    def reserve(self, name: str) -> int:
        """The slot that an adapter has, or that `add` would give it.

        Raises:
            EngineStateError: when all slots are taken.
        """
        if name in self._slots:
            return self._slots[name]
        free = sorted(set(range(self._max_loras)) - set(self._slots.values()))
        if not free:
            raise EngineStateError(
                f"adapter {name!r} finds no slot: max_loras is {self._max_loras}, taken by "
                f"{', '.join(map(repr, self._slots)) or 'none'}; unload one"
            )
        return free[0]

    def add(self, name: str, slot: int) -> None:
        """Notes that a slot holds an adapter."""
        self._slots[name] = slot

    def remove(self, name: str) -> None:
        """Frees the slot of a loaded adapter."""
        del self._slots[name]

    def clear(self) -> None:
        """Forgets all adapters, after the slots' contents were lost."""
        self._slots.clear()
