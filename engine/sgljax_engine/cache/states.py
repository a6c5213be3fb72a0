"""Who owns each slot of the pool of recurrent states. Host-only; no JAX.

A running request of a model with recurrent layers owns one slot from its start until it ends or is
retracted. Any other slot may be *kept* for the prefix cache: the state after a cached prefix, known
by the last page of that prefix. A request that begins with the prefix goes on from a copy of it.
Engine thread only.

Kept states go when their page does, or when a slot is needed: first one that a single request went
on from, to end with a longer one, as each turn of an episode does; else the one that was used the
longest time ago. States that a later prompt may share are *on trial* until one does: while slots
are short there are only so many of them, lest they push out those of episodes.

A state that is kept while a dispatch is planned is *fresh*: the dispatch computes it in the slot of
its request, and copies it behind the prefill.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable

from sgljax_engine.cache.allocator import PageAllocator
from sgljax_engine.errors import EngineError
from sgljax_engine.types import NO_STATE, Request, StateCopies, StateCopy

_SLOTS_PER_TRIAL = 8
"""Slots for each state on trial while slots are short."""


@dataclasses.dataclass(eq=False, slots=True)
class _Kept:
    """A kept state; one on trial was kept for prompts that may come, and none has come."""

    slot: int
    ends_request: bool = False
    on_trial: bool = False
    num_uses: int = 0


class StateSlots:
    def __init__(self, num_slots: int) -> None:
        self._allocator = PageAllocator(num_slots)
        self._most_trials = max(1, num_slots // _SLOTS_PER_TRIAL)
        self._forget_all()

    def _forget_all(self) -> None:
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        """Kept states by the last page of their prefix; what goes first is the first."""
        self._sources: dict[str, tuple[int, _Kept]] = {}
        """The pages and kept states that running requests went on from."""
        self._held: set[int] = set()
        """Pages whose slots take part in copies that are not dispatched yet."""
        self._fresh: dict[int, int] = {}
        """Slots of the requests that compute fresh states, by page."""
        self._copies = StateCopies([], [])

    @property
    def num_slots(self) -> int:
        return self._allocator.num_pages

    @property
    def num_available(self) -> int:
        """Slots that a request could get now."""
        return self._allocator.num_free + len(self._kept) - len(self._held)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def has_fresh(self) -> bool:
        """Whether the planned dispatch computes states that are kept."""
        return bool(self._fresh)

    @property
    def used(self) -> list[int]:
        return self._allocator.used

    def is_kept(self, page: int, *, also_fresh: bool) -> bool:
        """Whether the state after a prefix that ends in this page is kept, or will be."""
        return page in self._kept and (also_fresh or page not in self._fresh)

    # ------------------------------------------------------------------ requests

    def start(self, request: Request, page: int | None, *, is_late: bool) -> None:
        """Gives a request a slot, with a copy of the state kept for `page`.

        `is_late`: its state is not needed before the decode, since it has nothing to prefill.
        """
        if page is None:
            request.state_slot = self._allocate()
            return
        kept, is_held = self._kept[page], page in self._held
        self._kept.move_to_end(page)
        kept.on_trial = False
        kept.num_uses += 1
        self._held.add(page)
        if self.num_available or is_held:
            request.state_slot = self._allocate()
            self._sources[request.rid] = page, kept
            source = self._fresh.get(page, kept.slot)
            self._copies.at(is_late=is_late).append(StateCopy(source, request.state_slot))
        else:  # the only slot there is
            self._held.remove(page)
            request.state_slot = self._kept.pop(page).slot

    def release(self, request: Request, page: int | None) -> None:
        """Takes the slot of a request, and keeps it for its prefix's last page if it is of use."""
        slot, request.state_slot = request.state_slot, NO_STATE
        source = self._sources.pop(request.rid, None)
        if page is None or page in self._kept:
            self._allocator.free([slot])
            return
        self._kept[page] = _Kept(slot, ends_request=True)
        if source is not None and self._is_replaced(*source):
            self._kept.move_to_end(source[0], last=False)

    def _is_replaced(self, page: int, kept: _Kept) -> bool:
        """Whether a state is still kept, and only one request went on from where one had ended."""
        return self._kept.get(page) is kept and kept.ends_request and kept.num_uses == 1

    def keep(self, request: Request, page: int, *, on_trial: bool) -> None:
        """Keeps a copy of the state that the planned prefill computes, if there is room."""
        has_room = self.has_room_on_trial if on_trial else self.num_available
        if page in self._kept or not has_room:
            return
        slot = self._allocate(self._most_trials - on_trial)
        self._kept[page] = _Kept(slot, on_trial=on_trial)
        self._held.add(page)
        self._fresh[page] = request.state_slot
        self._copies.late.append(StateCopy(request.state_slot, slot))

    @property
    def has_room_on_trial(self) -> bool:
        """Whether a state can be kept for prompts that may come."""
        if self._allocator.num_free:
            return True
        trials = self._trials()
        is_full = len(trials) >= self._most_trials
        return bool(set(trials) - self._held) if is_full else self.num_available > 0

    def _trials(self) -> list[int]:
        """Pages of the states on trial, the oldest first."""
        return [page for page, kept in self._kept.items() if kept.on_trial]

    def _allocate(self, most_trials: int | None = None) -> int:
        if not self._allocator.num_free and self.num_available:
            trials = self._trials()
            most_trials = self._most_trials if most_trials is None else most_trials
            first = trials if len(trials) > most_trials else []
            page = next(page for page in [*first, *self._kept] if page not in self._held)
            self._allocator.free([self._kept.pop(page).slot])
        return self._allocator.allocate(1)[0]

    # ------------------------------------------------------------------ the cache

    def take_copies(self) -> StateCopies:
        """The copies that the planned dispatch makes."""
        copies, self._copies = self._copies, StateCopies([], [])
        return copies

    def settle(self) -> None:
        self._held.clear()
        self._fresh.clear()

    def forget(self, pages: Iterable[int]) -> None:
        for page in pages:
            if page in self._kept:
                if page in self._held:
                    raise EngineError(f"KV page {page} is freed, but its state is being copied")
                self._allocator.free([self._kept.pop(page).slot])

    def forget_kept(self) -> None:
        """Frees all kept states; no copy may wait to be dispatched."""
        self.forget(list(self._kept))

    def start_over(self) -> None:
        self._allocator.start_over()
        self._forget_all()

    def check_integrity(self, running: Iterable[Request]) -> None:
        self._allocator.check_integrity()
        kept = (kept.slot for kept in self._kept.values())
        owned = sorted([*(request.state_slot for request in running), *kept])
        if owned != self.used:
            raise EngineError(
                f"requests and the cache own the state slots {owned}, {self.used} are in use"
            )
        if not self._held <= self._kept.keys() or not self._fresh.keys() <= self._held:
            raise EngineError("a state that is copied is not kept")
