"""A device without a model: a slot holds which tokens, under which weights, wrote it.

What a key or value depends on is the weights and the tokens up to its position, so that is what
the slots keep. Whoever reads a slot that holds anything else gets an AssertionError: a page shared
with the wrong request, rewritten by another one, copied too late or left over from older weights.
Window pages likewise, of which a query reads its window, and recurrent states, which hold all
tokens that they took in.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from sgljax_engine.cache.states import StateSlots
from sgljax_engine.cache.window import NUM_NULL, WindowPages
from sgljax_engine.types import (
    PageCopy,
    Request,
    RowOutput,
    SchedulerOutput,
    StateCopy,
    StepOutput,
    StepTimes,
)

GARBAGE = object()


def times_of(dispatch_s: float) -> StepTimes:
    """Times of a dispatch that takes so many seconds."""
    return StepTimes(0.0, 0.0, 0.0, dispatch_s)


class FakeDevice:
    """Runs what the scheduler decides, in the order in which the runner dispatches it."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        rng: random.Random,
        windows: WindowPages | None = None,
        states: StateSlots | None = None,
    ) -> None:
        self.version = 0
        self.num_prefilled = 0
        self._page_size = page_size
        self._rng = rng
        self._pages: list[list[object]] = [[GARBAGE] * page_size for _ in range(num_pages)]
        self._map = windows
        count = 0 if windows is None else windows.sizes.num_pages + NUM_NULL
        self._windows: list[list[object]] = [[GARBAGE] * page_size for _ in range(count)]
        num_slots = 0 if states is None else states.num_slots
        self._states: list[object] = [GARBAGE] * num_slots

    def run(self, output: SchedulerOutput, stop_chance: float = 0.0) -> StepOutput:
        """Prefills, copies and decodes; each row takes up to its limit, perhaps stops early."""
        early, late = ([], []) if output.states is None else output.states
        self._copy_pages(output.early_copies)
        self._copy_states(early)
        for chunk in output.prefill:  # one dispatch: all chunks write before any reads
            end = chunk.start + chunk.num_tokens
            first = max(chunk.start, chunk.num_shared)
            self._write(chunk.request, chunk.pages, first, end)
            self._move_state(chunk.request, chunk.start, chunk.request.tokens(0, end))
            self.num_prefilled += chunk.num_tokens
        for chunk in output.prefill:
            end = chunk.start + chunk.num_tokens
            self._read(chunk.request, chunk.pages, end, first_query=chunk.start)
        self._copy_pages(output.copies)
        self._copy_states(late)
        for request in output.decode:
            self._read(request, request.pages, request.kv_len)
        rows = [
            self._decode(request, min(limit, output.num_steps), stop_chance)
            for request, limit in zip(output.decode, output.step_limits, strict=True)
        ]
        dispatch_s = self._rng.choice([None, 1e-3, 1.0, 5.0])
        return StepOutput(rows, times=None if dispatch_s is None else times_of(dispatch_s))

    def check(self, requests: list[Request]) -> None:
        """Raises unless all that running requests count as computed is what they find."""
        for request in requests:
            self._read(request, request.pages, request.num_computed)

    def spoil(self, output: SchedulerOutput) -> None:
        """Fails half-way: what the dispatch was to write is anything now."""
        for chunk in output.prefill:
            first = max(chunk.start, chunk.num_shared)
            for at in range(first, chunk.start + chunk.num_tokens):
                self._put(chunk.pages, at, GARBAGE)
        for copy in (*output.early_copies, *output.copies):
            for slots in self._both(copy.target):
                slots[:] = [GARBAGE] * self._page_size
        for states in output.states or ():
            for copy in states:
                self._states[copy.target] = GARBAGE
        for request in output.touched:
            if self._states:
                self._states[request.state_slot] = GARBAGE
        for request, limit in zip(output.decode, output.step_limits, strict=True):
            for at in range(request.kv_len, request.kv_len + min(limit, output.num_steps)):
                self._put(request.pages, at, GARBAGE)

    def lose_everything(self) -> None:
        """The pages were donated to a program that failed."""
        for slots in (*self._pages, *self._windows):
            slots[:] = [GARBAGE] * self._page_size
        self._states = [GARBAGE] * len(self._states)

    def _copy_pages(self, copies: Sequence[PageCopy]) -> None:
        sources = [[list(slots) for slots in self._both(copy.source)] for copy in copies]
        for copy, contents in zip(copies, sources, strict=True):
            for slots, new in zip(self._both(copy.target), contents, strict=True):
                slots[:] = new

    def _copy_states(self, copies: Sequence[StateCopy]) -> None:
        targets = [copy.target for copy in copies]
        assert len(set(targets)) == len(targets)
        assert not {copy.source for copy in copies} & set(targets)
        for copy in copies:
            self._states[copy.target] = self._states[copy.source]

    def _move_state(self, request: Request, start: int, tokens: Sequence[int]) -> None:
        """The request's state after `start` tokens becomes that after all of `tokens`."""
        if not self._states:
            return
        if start:  # else it begins from zeros
            assert self._states[request.state_slot] == self._content(list(tokens[:start])), (
                f"request {request.rid} goes on from another's state at position {start}"
            )
        self._states[request.state_slot] = self._content(list(tokens))

    def _decode(self, request: Request, count: int, stop_chance: float) -> RowOutput:
        stopped = self._rng.random() < stop_chance
        if stopped:
            count = self._rng.randint(1, count)
        # Few different tokens, so that samples of a prompt and later prompts often agree.
        tokens = [self._rng.randrange(2) for _ in range(count)]
        start = request.kv_len
        written = [*request.tokens(0, start + 1), *tokens]
        for at in range(start, start + count):
            self._put(request.pages, at, self._content(written[: at + 1]))
        self._move_state(request, start, written[: start + count])
        zeros = [0.0] * count
        return RowOutput(tokens, zeros, zeros, zeros, stopped)

    def _write(self, request: Request, pages: tuple[int, ...], start: int, end: int) -> None:
        tokens = request.tokens(0, end)
        for at in range(start, end):
            self._put(pages, at, self._content(tokens[: at + 1]))

    def _put(self, pages: Sequence[int], at: int, content: object) -> None:
        both = self._both(pages[at // self._page_size])
        assert self._map is None or len(both) == 2, f"position {at} has no window page"
        for slots in both:
            slots[at % self._page_size] = content

    def _both(self, page: int) -> list[list[object]]:
        """The slots of a page, and of its window page if it has one."""
        found = [self._pages[page]]
        if self._map is not None and self._map.by_page[page] >= 0:
            found.append(self._windows[self._map.by_page[page]])
        return found

    def _read(
        self, request: Request, pages: Sequence[int], end: int, first_query: int | None = None
    ) -> None:
        """Reads as a query behind `end` does, or as queries from `first_query` on."""
        tokens = request.tokens(0, end)
        if self._map is not None:
            first = (end if first_query is None else first_query) - self._map.sizes.num_tokens + 1
            for at in range(max(first, 0), end):
                page, offset = pages[at // self._page_size], at % self._page_size
                assert self._map.by_page[page] >= 0, f"{request.rid} lost its window at {at}"
                assert self._windows[self._map.by_page[page]][offset] == self._content(
                    tokens[: at + 1]
                ), f"request {request.rid} reads another's window at position {at}, page {page}"
        for at in range(end):
            page, offset = pages[at // self._page_size], at % self._page_size
            assert self._pages[page][offset] == self._content(tokens[: at + 1]), (
                f"request {request.rid} reads another's KV at position {at}, page {page}"
            )

    def _content(self, tokens: list[int]) -> object:
        return (self.version, tuple(tokens))
