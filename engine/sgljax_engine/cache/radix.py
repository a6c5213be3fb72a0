"""The prefix cache: a radix tree over pages of tokens. Host-only; no JAX.

Each edge of the tree is one page of tokens. So a path from the root spells a prefix, and its pages
hold the keys and values of that prefix. The idea is RadixAttention's (Zheng et al., SGLang, 2024);
edges of one page, as in vLLM's block chains, need no splitting.

Pages in the tree never change. A *tail* is a leaf with less than a page of tokens. No one appends
to it: a request that continues from there copies its page.

Nodes count the handles that pass through them. Nodes without a handle are kept in the order of
their last use, deepest first, and evicted from the front when pages run out. A node is always
released before its parent, so the front is always a leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from sgljax_engine.cache.allocator import PageAllocator
from sgljax_engine.errors import EngineError


class _Node:
    """One page. `refs` counts the handles that pass through it; a descendant never has more."""

    __slots__ = ("children", "key", "page", "parent", "refs")

    def __init__(self, key: tuple[int, ...], page: int, parent: _Node | None, refs: int) -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.refs = refs
        self.children: dict[tuple[int, ...], _Node] = {}


_GONE = -2
"""The page number of a node that has left the cache."""


class PrefixHandle(NamedTuple):
    """A cached prefix in use: none of its pages is evicted before the handle is released.

    The result of `RadixCache.find` is in use once it is held. `node` is that of the last full page;
    `tail` is that of the next, if it holds all remaining tokens or is that of `state`, the part
    behind which a model with recurrent states continues.
    """

    root: _Node
    node: _Node
    num_pages: int
    tail: _Node | None = None
    state: PrefixHandle | None = None

    def num_tokens(self, page_size: int) -> int:
        """Number of tokens in its pages, the tail included."""
        return self.num_pages * page_size + (0 if self.tail is None else len(self.tail.key))

    @property
    def last_page(self) -> int:
        """Its last page, be it full or not; it must not be empty."""
        return self.node.page if self.tail is None else self.tail.page

    def shortened(self, num_pages: int) -> PrefixHandle:
        """The first pages of a prefix that is not held."""
        node = self.node
        for _ in range(self.num_pages - num_pages):
            assert node.parent is not None
            node = node.parent
        return PrefixHandle(self.root, node, num_pages)

    def pages(self) -> list[int]:
        """Ids of the full pages, in the order of their tokens."""
        return [node.page for node in _path(self)][::-1]


def _path(handle: PrefixHandle) -> Iterator[_Node]:
    """The nodes of a handle's full pages, deepest first."""
    node: _Node | None = handle.node
    while node is not None and node is not handle.root:
        yield node
        node = node.parent


class RadixCache:
    """Cached prefixes, and the allocator of their pages, for it alone. Engine thread only."""

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self._allocator = allocator
        self._page_size = page_size
        self._roots: dict[int, _Node] = {}
        self._unused: OrderedDict[_Node, None] = OrderedDict()
        self.num_cached = 0  # pages, with those of reset trees that handles still hold

    @property
    def num_evictable(self) -> int:
        """Cached pages that no handle holds."""
        return len(self._unused)

    @property
    def num_available(self) -> int:
        """Pages that can be allocated now, with eviction if needed."""
        return self._allocator.num_free + self.num_evictable

    def allocate(self, count: int) -> list[int]:
        """Evicts the least recently used pages if needed; EngineError if that is not enough."""
        if count <= self.num_available:
            while self._allocator.num_free < count:
                self._evict()
        return self._allocator.allocate(count)

    def find(
        self,
        tokens: Callable[[int, int], Sequence[int]],
        num_tokens: int,
        space: int = 0,
        known: PrefixHandle | None = None,
    ) -> PrefixHandle:
        """The longest cached prefix in whole pages, with a tail if the cache has all tokens.

        The result is not held: until `hold`, any other call may evict it. `tokens` gives those from
        a start to an end. `known` is an earlier result for the first of them: then only what the
        cache has gained or lost since takes time.
        """
        size = self._page_size
        root = self._root(space)
        node, num_pages = root, 0
        if known is not None and known.root is root:
            node, num_pages = known.node, known.num_pages
            while node.page == _GONE:
                assert node.parent is not None
                node, num_pages = node.parent, num_pages - 1
        first = num_pages * size
        child = None
        if first + size <= num_tokens:
            child = node.children.get(tuple(tokens(first, first + size)))
        if child is not None:
            rest = tokens(first, num_tokens)
            start = 0
            while child is not None:
                node, num_pages, start = child, num_pages + 1, start + size
                end = start + size
                child = node.children.get(tuple(rest[start:end])) if end <= len(rest) else None
        tail, num_left = None, num_tokens - num_pages * size
        if 0 < num_left < size:
            tail = node.children.get(tuple(tokens(num_tokens - num_left, num_tokens)))
        return PrefixHandle(root, node, num_pages, tail)

    def with_state(
        self,
        handle: PrefixHandle,
        tokens: Callable[[int, int], Sequence[int]],
        num_tokens: int,
        is_known: Callable[[int, bool], bool],
        *,
        with_tail: bool = True,
    ) -> PrefixHandle:
        """A prefix that was just found, with the longest part of it whose state is known.

        Its tail is left out unless that is this part's end. `is_known` gets the last page, and
        whether the part has all tokens.
        """
        size, node, count = self._page_size, handle.node, handle.num_pages
        if with_tail and handle.tail is not None and is_known(handle.tail.page, True):
            return handle._replace(state=handle)
        handle = handle._replace(tail=None, state=None)
        while True:
            part, done = PrefixHandle(handle.root, node, count), count * size
            rest = tuple(tokens(done, min(done + size - 1, num_tokens))) if with_tail else ()
            tails = [
                tail
                for key, tail in node.children.items()
                if len(key) < size and rest[: len(key)] == key and is_known(tail.page, False)
            ]
            if tails:
                part = part._replace(tail=max(tails, key=lambda tail: len(tail.key)))
                is_last = count == handle.num_pages
                return handle._replace(tail=part.tail if is_last else None, state=part)
            if node is handle.root:
                return handle
            if is_known(node.page, done == num_tokens):
                return handle._replace(state=part)
            assert node.parent is not None
            node, count = node.parent, count - 1

    def hold(self, handle: PrefixHandle) -> None:
        for node in _path(handle):
            self._hold(node)
        if handle.tail is not None:
            self._hold(handle.tail)

    def num_unused(self, handle: PrefixHandle) -> int:
        """Pages of a just found prefix that nobody holds, and that `hold` makes unavailable."""
        tails = {handle.tail, handle.state and handle.state.tail} - {None}
        count = sum(tail is not None and tail.refs == 0 for tail in tails)
        for node in _path(handle):
            if node.refs:  # and so have all above it
                break
            count += 1
        return count

    def is_current(self, handle: PrefixHandle) -> bool:
        """False if the cache was reset since the handle was made; then it must not be extended."""
        return self._is_current(handle.root)

    def extend(
        self, handle: PrefixHandle, tokens: Sequence[int], pages: Sequence[int], *, merge: bool
    ) -> PrefixHandle:
        """Appends full pages to a current handle without a tail, which this call consumes.

        The cache owns the pages from now on. If it has a page already, `merge` frees the given page
        and uses the cache's; else the prefix ends there.
        """
        size, node, num_pages = self._page_size, handle.node, handle.num_pages
        for i, page in enumerate(pages):
            key = tuple(tokens[i * size : (i + 1) * size])
            child = node.children.get(key)
            if child is None:
                child = self._add(node, key, page)
            elif merge:
                self._allocator.free([page])
                self._hold(child)
            else:
                break
            node = child
            num_pages += 1
        return PrefixHandle(handle.root, node, num_pages, handle.tail)

    def has_tail(self, handle: PrefixHandle, tokens: Sequence[int]) -> bool:
        """Whether the cache has a tail of exactly these tokens after a handle's full pages."""
        return tuple(tokens) in handle.node.children

    def add_tail(self, handle: PrefixHandle, tokens: Sequence[int], page: int) -> PrefixHandle:
        """Adds a partial page with the tokens that follow a handle's full pages.

        Returns a second handle, for the prefix with its tail.
        """
        assert 0 < len(tokens) < self._page_size
        tail = self._add(handle.node, tuple(tokens), page)
        return self.hold_again(handle)._replace(tail=tail)

    def hold_tail(self, handle: PrefixHandle, tokens: Sequence[int]) -> PrefixHandle:
        """A second handle, for the prefix with a tail that the cache has, see `has_tail`."""
        tail = handle.node.children[tuple(tokens)]
        handle = self.hold_again(handle)._replace(tail=tail)
        self._hold(tail)
        return handle

    def hold_again(self, handle: PrefixHandle) -> PrefixHandle:
        for node in _path(handle):
            self._hold(node)
        return handle._replace(tail=None)

    def release(self, handle: PrefixHandle) -> None:
        if handle.tail is not None:
            self._let_go(handle.tail, handle.root)
        for node in _path(handle):
            self._let_go(node, handle.root)

    def reset(self) -> int:
        """Empties the cache: nothing cached so far is ever matched again.

        Unused pages are freed at once, the others when their handles are released. Returns the
        number of pages freed now.
        """
        num_freed = len(self._unused)
        for node in self._unused:
            self._drop(node)
        self._unused.clear()
        self._roots.clear()
        return num_freed

    def reset_space(self, space: int) -> int:
        """`reset` for only one space."""
        root = self._roots.pop(space, None)
        stack = [] if root is None else list(root.children.values())
        num_freed = 0
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.refs == 0:
                del self._unused[node]
                self._drop(node)
                num_freed += 1
        return num_freed

    # ------------------------------------------------------------------ nodes

    def _root(self, space: int) -> _Node:
        return self._roots.setdefault(space, _Node((), -1, None, 1))

    def _is_current(self, root: _Node) -> bool:
        return root in self._roots.values()

    def _add(self, parent: _Node, key: tuple[int, ...], page: int) -> _Node:
        if key in parent.children:
            raise EngineError(f"the prefix cache has these {len(key)} tokens already")
        node = _Node(key, page, parent, 1)
        parent.children[key] = node
        self.num_cached += 1
        return node

    def _hold(self, node: _Node) -> None:
        if node.refs == 0:
            del self._unused[node]
        node.refs += 1

    def _let_go(self, node: _Node, root: _Node) -> None:
        node.refs -= 1
        if node.refs == 0:
            if self._is_current(root):
                self._unused[node] = None
            else:
                self._drop(node)

    def _evict(self) -> None:
        node, _ = self._unused.popitem(last=False)
        assert node.parent is not None
        del node.parent.children[node.key]
        self._drop(node)

    def _drop(self, node: _Node) -> None:
        self._allocator.free([node.page])
        node.page = _GONE
        self.num_cached -= 1

    # ------------------------------------------------------------------ integrity

    def prefixes(self) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """(tokens from the root, page, handles) of every node of the current trees."""
        stack: list[tuple[tuple[int, ...], _Node]]
        stack = [((), child) for root in self._roots.values() for child in root.children.values()]
        while stack:
            above, node = stack.pop()
            tokens = (*above, *node.key)
            yield tokens, node.page, node.refs
            stack.extend((tokens, child) for child in node.children.values())

    def check_integrity(self) -> None:
        seen: set[_Node] = set()
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            for key, child in node.children.items():
                if child.parent is not node or child.key != key or not key:
                    raise EngineError("a node of the prefix cache is misplaced")
                if len(key) > self._page_size or (len(node.key) < self._page_size and node.parent):
                    raise EngineError("a node of the prefix cache has a page of the wrong length")
                if child.refs > node.refs and node.parent is not None:
                    raise EngineError("a cached page is held without the pages before it")
                if (child.refs == 0) != (child in self._unused):
                    raise EngineError("the prefix cache's eviction order has lost a page")
                seen.add(child)
                stack.append(child)
        if not seen >= set(self._unused):
            raise EngineError("the prefix cache would evict a page twice")
        if len(seen) > self.num_cached:
            raise EngineError(f"{len(seen)} pages in the prefix cache, {self.num_cached} counted")
        passed: set[_Node] = set()
        for node in self._unused:
            if any(child not in passed for child in node.children.values()):
                raise EngineError("the prefix cache would evict a page before those behind it")
            passed.add(node)
