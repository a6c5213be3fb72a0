"""The prefix cache and its allocator beside a model of them made of plain dictionaries.

Every operation is done to both and compared. `random_operations` drives them from a seed; the
state machine of `test_radix.py` uses them as well.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from sgljax_engine.cache.allocator import PageAllocator
from sgljax_engine.cache.radix import PrefixHandle, RadixCache
from sgljax_engine.errors import EngineError

Tokens = tuple[int, ...]


@dataclasses.dataclass(eq=False)
class Entry:
    """A cached page. `tokens` are all from the first of the prefix on; `used_at` is its recency."""

    tokens: Tokens
    page: int
    num_handles: int = 0
    used_at: int = 0


@dataclasses.dataclass(eq=False)
class Held:
    """A handle, and what the model says that it holds."""

    handle: PrefixHandle
    entries: list[Entry]
    tail: Entry | None
    resets: int

    @property
    def tokens(self) -> Tokens:
        return self.entries[-1].tokens if self.entries else ()


def acquire(cache: RadixCache, tokens: Sequence[int]) -> PrefixHandle:
    """Finds the longest cached prefix and holds it."""
    handle = cache.find(lambda start, end: tokens[start:end], len(tokens))
    cache.hold(handle)
    return handle


class CheckedCache:
    """A `RadixCache` whose every answer is checked."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.allocator = PageAllocator(num_pages)
        self.cache = RadixCache(self.allocator, page_size)
        self.entries: dict[Tokens, Entry] = {}
        self.handles: list[Held] = []
        self.found: dict[Tokens, PrefixHandle] = {}
        self.own: list[int] = []
        self.free = set(range(num_pages))
        self.num_resets = self.num_evictions = self.num_hits = self.num_merges = 0
        self._clock = 0

    # ------------------------------------------------------------------ operations

    def allocate(self, count: int) -> None:
        """Takes pages for the caller; too many must be refused and change nothing."""
        if count > len(self.free) + len(self._unused()):
            try:
                self.cache.allocate(count)
            except EngineError:
                return
            raise AssertionError(f"allocated {count} pages that do not exist")
        while len(self.free) < count:
            leaves = [e for e in self._unused() if not self._has_children(e)]
            oldest = min(leaves, key=lambda e: e.used_at)
            self._forget(oldest)
            self.num_evictions += 1
        pages = self.cache.allocate(count)
        assert len(set(pages)) == len(pages) == count
        assert self.free.issuperset(pages), "a page was handed out that was not free"
        self.free.difference_update(pages)
        self.own.extend(pages)

    def free_own(self, count: int) -> None:
        """Gives pages of the caller back."""
        pages, self.own = self.own[:count], self.own[count:]
        self.allocator.free(pages)
        self.free.update(pages)

    def acquire(self, tokens: Sequence[int]) -> None:
        """Looks a prefix up."""
        handle = acquire(self.cache, tokens)
        wanted = tuple(tokens)
        found: list[Entry] = []
        for end in range(self.page_size, len(wanted) + 1, self.page_size):
            if wanted[:end] not in self.entries:
                break
            found.append(self.entries[wanted[:end]])
        num_full = len(wanted) // self.page_size
        has_rest = len(wanted) % self.page_size > 0 and len(found) == num_full
        tail = self.entries.get(wanted) if has_rest else None
        self.num_hits += bool(found)
        self._hold([*found, *([tail] if tail else [])])
        self.handles.append(Held(handle, found, tail, self.num_resets))

    def extend(self, held: Held, tokens: Sequence[int], count: int, *, merge: bool) -> None:
        """Gives `count` pages of the caller with these tokens to the cache."""
        assert len(tokens) == count * self.page_size
        pages = self.own[:count]
        held.handle = self.cache.extend(held.handle, tokens, pages, merge=merge)
        for i, page in enumerate(pages):
            path = (*held.tokens, *tokens[i * self.page_size : (i + 1) * self.page_size])
            known = self.entries.get(path)
            if known is not None and not merge:
                break
            self.own.remove(page)
            if known is None:
                known = self.entries[path] = Entry(path, page)
            else:
                self.free.add(page)
                self.num_merges += 1
            self._hold([known])
            held.entries.append(known)

    def add_tail(self, held: Held, rest: Sequence[int]) -> None:
        """Gives the caller's first page with these tokens to the cache; twice is refused."""
        path = (*held.tokens, *rest)
        assert self.cache.has_tail(held.handle, rest) == (path in self.entries)
        if path in self.entries:
            try:
                self.cache.add_tail(held.handle, rest, self.own[0])
            except EngineError:
                return
            raise AssertionError("a tail was added twice")
        page = self.own.pop(0)
        handle = self.cache.add_tail(held.handle, rest, page)
        tail = self.entries[path] = Entry(path, page)
        self._hold([*held.entries, tail])
        self.handles.append(Held(handle, list(held.entries), tail, held.resets))

    def find(self, tokens: Tokens, more: Tokens) -> None:
        """Finds a prefix by what was found for its first tokens at some earlier time."""
        whole = (*tokens, *more)

        def find(known: PrefixHandle | None) -> PrefixHandle:
            return self.cache.find(lambda start, end: whole[start:end], len(whole), known=known)

        handle = find(None)
        assert find(self.found.get(tokens)) == handle
        self.found[whole] = handle
        path = [whole[: end * self.page_size] for end in range(1, handle.num_pages + 1)]
        path += [whole] if handle.tail is not None else []
        assert self.cache.num_unused(handle) == sum(
            not self.entries[each].num_handles for each in path
        )

    def hold_again(self, held: Held) -> None:
        """A second handle of the same pages."""
        handle = self.cache.hold_again(held.handle)
        self._hold(held.entries)
        self.handles.append(Held(handle, list(held.entries), None, held.resets))

    def release(self, held: Held) -> None:
        """Ends a handle."""
        self.handles.remove(held)
        self.cache.release(held.handle)
        self._let_go([*([held.tail] if held.tail else []), *reversed(held.entries)], held.resets)

    def reset(self) -> None:
        """Forgets everything."""
        unused = self._unused()
        assert self.cache.reset() == len(unused)
        self.free.update(e.page for e in unused)
        self.entries = {}
        self.num_resets += 1

    # ------------------------------------------------------------------ comparison

    def check(self) -> None:
        """Raises unless cache and model agree in every respect."""
        self.allocator.check_integrity()
        self.cache.check_integrity()
        nodes = list(self.cache.prefixes())
        assert len(nodes) == len(self.entries)
        assert {tokens: (page, refs) for tokens, page, refs in nodes} == {
            tokens: (e.page, e.num_handles) for tokens, e in self.entries.items()
        }
        held_back = {e for h in self.handles if not self.is_current(h) for e in _all(h)}
        num_cached = len(self.entries) + len(held_back)
        assert self.cache.num_cached == num_cached
        assert self.allocator.num_free == len(self.free)
        assert len(self.free) + len(self.own) + num_cached == self.num_pages
        assert self.cache.num_evictable == len(self._unused())
        assert self.cache.num_available == len(self.free) + len(self._unused())
        for held in self.handles:
            assert self.cache.is_current(held.handle) == self.is_current(held)
            assert held.handle.num_pages == len(held.entries)
            assert held.handle.pages() == [e.page for e in held.entries]
            tail = held.handle.tail
            assert (None if tail is None else tail.page) == (held.tail and held.tail.page)
            assert held.handle.num_tokens(self.page_size) == len((held.tail or held).tokens)

    def is_current(self, held: Held) -> bool:
        """Whether the cache was not reset since."""
        return held.resets == self.num_resets

    def finish(self) -> None:
        """Lets go of everything and checks that nothing stays behind."""
        for held in list(self.handles):
            self.release(held)
        self.free_own(len(self.own))
        self.reset()
        self.check()
        assert self.allocator.num_free == self.num_pages
        assert self.cache.num_cached == 0

    def _hold(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            entry.num_handles += 1

    def _let_go(self, entries: Sequence[Entry], resets: int) -> None:
        """Deepest first, which makes a page older than those before it."""
        for entry in entries:
            entry.num_handles -= 1
            self._clock += 1
            entry.used_at = self._clock
            if entry.num_handles == 0 and resets != self.num_resets:
                self.free.add(entry.page)

    def _unused(self) -> list[Entry]:
        return [e for e in self.entries.values() if e.num_handles == 0]

    def _has_children(self, entry: Entry) -> bool:
        size = len(entry.tokens)
        if size % self.page_size:
            return False  # a tail
        return any(len(t) > size and t[:size] == entry.tokens for t in self.entries)

    def _forget(self, entry: Entry) -> None:
        del self.entries[entry.tokens]
        self.free.add(entry.page)


def _all(held: Held) -> list[Entry]:
    return [*held.entries, *([held.tail] if held.tail else [])]


# ---------------------------------------------------------------------- random driver

WEIGHTS = {
    "acquire": 6,
    "extend": 8,
    "release": 9,
    "allocate": 6,
    "add_tail": 2,
    "hold_again": 1,
    "find": 6,
    "free_own": 0.5,
    "reset": 0.1,
}
EPISODE = 500
"""Operations on one cache, before the next one, of another size, starts empty."""


@dataclasses.dataclass
class Totals:
    """What happened in a run: proof that it went to the interesting places."""

    operations: int = 0
    evictions: int = 0
    hits: int = 0
    merges: int = 0
    resets: int = 0


def random_operations(seed: int, count: int) -> Totals:
    """Does `count` operations, all derived from the seed, with every check after each."""
    rng, totals = random.Random(seed), Totals()
    names, weights = list(WEIGHTS), list(WEIGHTS.values())
    while totals.operations < count:
        checked = CheckedCache(num_pages=rng.randint(1, 24), page_size=rng.randint(1, 4))
        num_operations = min(EPISODE, count - totals.operations)
        for _ in range(num_operations):
            _operate(checked, rng.choices(names, weights)[0], rng)
            checked.check()
        checked.finish()
        totals.operations += num_operations
        totals.evictions += checked.num_evictions
        totals.hits += checked.num_hits
        totals.merges += checked.num_merges
        totals.resets += checked.num_resets
    return totals


def _operate(checked: CheckedCache, name: str, rng: random.Random) -> None:
    size = checked.page_size

    def random_tokens(count: int) -> Tokens:
        return tuple(rng.randrange(2) for _ in range(count))

    if name == "acquire":
        known = rng.choice([(), *checked.entries])
        checked.acquire((*known, *random_tokens(rng.randint(0, 2 * size))))
    elif name == "find":
        known = rng.choice([(), *checked.found, *checked.entries])
        checked.find(known, random_tokens(rng.randint(0, 2 * size)))
    elif name == "allocate":
        checked.allocate(rng.randint(0, 4))
    elif name == "free_own":
        checked.free_own(rng.randint(0, len(checked.own)))
    elif name == "reset":
        checked.reset()
    elif name == "extend":
        able = [h for h in checked.handles if checked.is_current(h) and h.tail is None]
        if able:
            count = rng.randint(0, min(3, len(checked.own)))
            tokens = random_tokens(count * size)
            checked.extend(rng.choice(able), tokens, count, merge=rng.random() < 0.5)
    elif name == "add_tail":
        able = [h for h in checked.handles if checked.is_current(h) and h.tail is None]
        if able and checked.own and size > 1:
            checked.add_tail(rng.choice(able), random_tokens(rng.randint(1, size - 1)))
    elif checked.handles:
        held = rng.choice(checked.handles)
        {
            "release": checked.release,
            "hold_again": checked.hold_again,
        }[name](held)
