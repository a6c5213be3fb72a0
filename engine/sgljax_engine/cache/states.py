"""Who owns each slot of the pool of recurrent states. Host-only; no JAX.

A running request of a model with recurrent layers owns one slot from its start until it ends or is
retracted; a retracted request starts again from its first token, so its slot's contents are lost
with the slot. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Iterable

from sgljax_engine.cache.allocator import PageAllocator
from sgljax_engine.errors import EngineError
from sgljax_engine.types import NO_STATE, Request


class StateSlots:
    """The slots, and which requests have one."""

    def __init__(self, num_slots: int) -> None:
        """Starts with every slot free.

        Args:
            num_slots: Slots of the pool.
        """
        self._allocator = PageAllocator(num_slots)

    @property
    def num_slots(self) -> int:
        """Slots of the pool."""
        return self._allocator.num_pages

    @property
    def num_free(self) -> int:
        """Slots that a request could get now."""
        return self._allocator.num_free

    @property
    def used(self) -> list[int]:
        """Slots whose contents may be read, ascending."""
        return self._allocator.used

    def start(self, request: Request) -> None:
        """Gives a request a slot; raises EngineError if none is free."""
        (request.state_slot,) = self._allocator.allocate(1)

    def release(self, request: Request) -> None:
        """Takes the slot of a request."""
        self._allocator.free([request.state_slot])
        request.state_slot = NO_STATE

    def start_over(self) -> None:
        """Frees every slot."""
        self._allocator.start_over()

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raises EngineError unless running requests have all used slots, one each."""
        self._allocator.check_integrity()
        owned = sorted(request.state_slot for request in running)
        if owned != self.used:
            raise EngineError(f"running requests own the state slots {owned}, used are {self.used}")
