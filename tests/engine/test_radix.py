"""Allocator and prefix cache as state machines, each beside a model of plain Python."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from sgljax_engine.cache.allocator import PageAllocator
from sgljax_engine.cache.pool import PagePool
from sgljax_engine.cache.radix import RadixCache
from sgljax_engine.errors import EngineError
from sgljax_engine.types import Request, SamplingParams
from tests.engine.radix_model import CheckedCache, acquire, random_operations


class AllocatorMachine(RuleBasedStateMachine):
    """The free pages are a stack."""

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages):
        self.allocator = PageAllocator(num_pages)
        self.stack = list(reversed(range(num_pages)))
        self.used: list[int] = []

    @rule(count=st.integers(0, 6))
    def allocate(self, count):
        if count > len(self.stack):
            with pytest.raises(EngineError, match="cannot allocate"):
                self.allocator.allocate(count)
            return
        pages = self.allocator.allocate(count)
        assert pages == [self.stack.pop() for _ in range(count)]
        self.used.extend(pages)

    @rule(data=st.data())
    def free(self, data):
        pages = data.draw(st.lists(st.sampled_from(self.used), unique=True) if self.used else NONE)
        self.allocator.free(pages)
        self.stack.extend(reversed(pages))
        self.used = [page for page in self.used if page not in pages]

    @precondition(lambda self: self.stack)
    @rule(data=st.data())
    def free_what_is_free(self, data):
        with pytest.raises(EngineError, match="not in use"):
            self.allocator.free([data.draw(st.sampled_from(self.stack))])

    @precondition(lambda self: self.used)
    @rule()
    def free_twice_at_once(self):
        """The error leaves the pages freed behind the culprit; nothing is lost or doubled."""
        page = self.used.pop()
        with pytest.raises(EngineError, match=f"page {page} freed"):
            self.allocator.free([page, page])
        self.stack.append(page)

    @rule(page=st.sampled_from([-1, -12, 12, 100]))
    def free_what_does_not_exist(self, page):
        with pytest.raises(EngineError, match="not in use"):
            self.allocator.free([page])

    @invariant()
    def adds_up(self):
        self.allocator.check_integrity()
        assert self.allocator.num_free == len(self.stack)
        assert self.allocator.num_used == len(self.used)


NONE = st.just([])
TOKENS = st.lists(st.integers(0, 1), max_size=8)


class RadixMachine(RuleBasedStateMachine):
    """`CheckedCache` compares every answer with the model's, and all of the state after it."""

    @initialize(num_pages=st.integers(1, 16), page_size=st.integers(1, 3))
    def start(self, num_pages, page_size):
        self.checked = CheckedCache(num_pages, page_size)

    def held(self, data, *, extendable=False):
        handles = self.checked.handles
        if extendable:
            handles = [h for h in handles if self.checked.is_current(h) and h.tail is None]
        return data.draw(st.sampled_from(handles)) if handles else None

    @rule(count=st.integers(0, 5))
    def allocate(self, count):
        self.checked.allocate(count)

    @rule(count=st.integers(1, 4))
    def free_own(self, count):
        self.checked.free_own(min(count, len(self.checked.own)))

    @rule(data=st.data(), more=TOKENS)
    def acquire(self, data, more):
        known = data.draw(st.sampled_from([(), *self.checked.entries]))
        self.checked.acquire([*known, *more])

    @rule(data=st.data(), tokens=TOKENS, merge=st.booleans())
    def extend(self, data, tokens, merge):
        if held := self.held(data, extendable=True):
            count = min(len(tokens) // self.checked.page_size, len(self.checked.own))
            tokens = tokens[: count * self.checked.page_size]
            self.checked.extend(held, tokens, count, merge=merge)

    @rule(data=st.data(), first=st.integers(0, 1), second=st.integers(0, 1))
    def add_tail(self, data, first, second):
        rest = [first, second][: self.checked.page_size - 1]
        if rest and self.checked.own and (held := self.held(data, extendable=True)):
            self.checked.add_tail(held, rest)

    @rule(data=st.data(), more=TOKENS)
    def find(self, data, more):
        known = data.draw(st.sampled_from([(), *self.checked.found, *self.checked.entries]))
        self.checked.find(known, tuple(more))

    @rule(data=st.data())
    def hold_again(self, data):
        if held := self.held(data):
            self.checked.hold_again(held)

    @rule(data=st.data())
    def release(self, data):
        if held := self.held(data):
            self.checked.release(held)

    @rule()
    def reset(self):
        self.checked.reset()

    @invariant()
    def agrees(self):
        self.checked.check()

    def teardown(self):
        self.checked.finish()


LONG = settings(max_examples=200, stateful_step_count=40, deadline=None, derandomize=True)
SHORT = settings(LONG, max_examples=40)
TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = SHORT
TestRadixMachine = RadixMachine.TestCase
TestRadixMachine.settings = SHORT


@pytest.mark.soak
class TestLongAllocatorMachine(AllocatorMachine.TestCase):
    """More examples of the allocator's machine."""

    settings = LONG


@pytest.mark.soak
class TestLongRadixMachine(RadixMachine.TestCase):
    """More examples of the prefix cache's machine."""

    settings = LONG


def test_forty_thousand_random_operations():
    """Enough of them for every kind of change."""
    totals = random_operations(seed=0, count=40_000)
    assert totals.operations == 40_000
    assert min(totals.evictions, totals.hits, totals.merges, totals.resets) > 100


class TestPlantedFaults:
    def make(self, num_pages=8, page_size=2):
        allocator = PageAllocator(num_pages)
        return allocator, RadixCache(allocator, page_size)

    def store(self, cache, tokens):
        pages = cache.allocate(len(tokens) // 2)
        cache.release(cache.extend(acquire(cache, []), tokens, pages, merge=True))
        return pages

    @pytest.mark.parametrize("fault", ["lost", "twice", "early", "miscounted", "held", "misplaced"])
    def test_integrity_check_finds_planted_faults(self, fault):
        _, cache = self.make()
        self.store(cache, [1, 1, 2, 2])
        first = cache._root(0).children[1, 1]
        second = first.children[2, 2]
        cache.check_integrity()
        if fault == "lost":
            del cache._unused[second]
        elif fault == "twice":
            del first.children[2, 2]
        elif fault == "early":
            cache._unused.move_to_end(second)
        elif fault == "miscounted":
            cache.num_cached = 1
        elif fault == "held":
            second.refs = 1
        else:
            second.key = (3, 3)
        with pytest.raises(EngineError):
            cache.check_integrity()


def test_no_tail_behind_pages_that_are_another_requests():
    """Between two chunks of a prompt another request stored the page that the second one fills."""
    pool = PagePool(PageAllocator(8), 4)

    def start(rid, prompt):
        request = Request(rid=rid, prompt_ids=prompt, params=SamplingParams(), seed=0)
        prefix = pool.find_prefix(request)
        pool.start(request, prefix, pool.pages_for(len(prompt)) - prefix.num_pages)
        return request

    slow = start("slow", list(range(12)))
    assert pool.share(slow, 6, with_tail=False) == []
    quick = start("quick", list(range(9)))
    assert quick.num_computed == 4
    quick.num_computed = 8
    pool.release(quick)
    slow.num_computed = 11
    assert pool.share(slow, 11, with_tail=True) == []
    pool.check_integrity([slow])
    assert start("other", [0, 1, 2, 3, 8, 9, 10, 11]).num_computed == 4
