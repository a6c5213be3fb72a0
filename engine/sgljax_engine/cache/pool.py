"""Pages of requests: their own, and those shared through the prefix cache.

Host-only; no JAX. A running request's `pages` begin with shared pages, which the cache owns and no
one writes to; the rest are its own. With a pool of window pages (`cache.window`), a running request
holds the window pages of a span of its pages: from the first page that its next query sees to the
last written one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from sgljax_engine.cache.allocator import PageAllocator
from sgljax_engine.cache.radix import PrefixHandle, RadixCache
from sgljax_engine.cache.states import StateSlots
from sgljax_engine.cache.window import WindowPages
from sgljax_engine.errors import EngineError
from sgljax_engine.types import NO_ADAPTER, PageCopy, Request


class PagePool:
    """All pages, and who owns each. Engine thread only.

    Attributes:
        page_size: Tokens in a page.
        is_sharing: Whether there is a prefix cache.
        windows: The window pages of models with sliding layers; None where all layers share pages.
        states: The slots of recurrent states; None for models without.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        page_size: int,
        *,
        is_sharing: bool = True,
        windows: WindowPages | None = None,
        states: StateSlots | None = None,
    ) -> None:
        self.page_size = page_size
        self.is_sharing = is_sharing
        self.windows = windows
        self.states = states
        self._allocator = allocator
        self._forget_all()

    def _forget_all(self) -> None:
        self._cache = RadixCache(self._allocator, self.page_size)
        self._handles: dict[str, PrefixHandle] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        self._copied: list[PrefixHandle] = []
        self._sought: tuple[Request, PrefixHandle] | None = None
        self._touched: Request | None = None

    def start_over(self) -> None:
        """Frees every page, after a failure that left their owners in doubt."""
        self._allocator.start_over()
        if self.windows is not None:
            self.windows.start_over()
        if self.states is not None:
            self.states.start_over()
        self._forget_all()

    @property
    def num_pages(self) -> int:
        return self._allocator.num_pages

    @property
    def num_available(self) -> int:
        """Pages that can be allocated: free pages, and unused cached pages."""
        return self._cache.num_available

    @property
    def num_cached(self) -> int:
        """Pages that the prefix cache owns, in use or not; see `RadixCache`."""
        return self._cache.num_cached

    @property
    def has_free_state(self) -> bool:
        """Whether a request could get a slot for its recurrent state, if it needs one."""
        return self.states is None or self.states.num_available > 0

    @property
    def used_pages(self) -> list[int]:
        """Pages whose contents may be read: pages of requests and cached pages; ascending."""
        return self._allocator.used

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    # ------------------------------------------------------------------ one request

    def find_prefix(self, request: Request) -> PrefixHandle:
        """The cached prefix of a waiting request; valid until the pool changes. See `start`.

        Each dispatch may look at the queue's head. After the first time a long prompt takes no
        longer than a short one.
        """
        num_tokens = request.kv_len if self.is_sharing else 0
        space = request.adapter - NO_ADAPTER
        sought, known = self._sought or (request, None)
        handle = self._cache.find(
            request.tokens, num_tokens, space, known if sought is request else None
        )
        self._sought = request, handle
        if self.states is not None:
            return self._with_state(request, handle)
        if self.windows is None:
            return handle
        pages, tail = handle.pages(), handle.tail
        if tail is not None and self.windows.is_usable([*pages, tail.page], num_tokens):
            return handle
        return handle.shortened(self.windows.usable(pages))

    def without_tail(self, request: Request, handle: PrefixHandle) -> PrefixHandle:
        """The part of a request's prefix from which it continues without a page beside its own.

        Such are a tail, which it would copy, and one whose state it would copy.
        """
        if self.states is not None:
            return self._with_state(request, handle, with_tail=False)
        handle = handle._replace(tail=None)
        if self.windows is None:
            return handle
        return handle.shortened(self.windows.usable(handle.pages()))

    def _with_state(
        self,
        request: Request,
        handle: PrefixHandle,
        *,
        with_tail: bool = True,
        also_fresh: bool = False,
    ) -> PrefixHandle:
        states = self.states
        assert states is not None

        def is_known(page: int, has_all: bool) -> bool:
            return states.is_kept(page, also_fresh=has_all or also_fresh)

        return self._cache.with_state(
            handle, request.tokens, request.kv_len, is_known, with_tail=with_tail
        )

    def awaits_state(self, request: Request, handle: PrefixHandle) -> bool:
        """Whether the planned dispatch computes a state that leaves the request less to prefill."""
        if self.states is None or not self.states.has_fresh:
            return False
        longest = self._with_state(request, handle, also_fresh=True)
        return self.num_ready(longest) > self.num_ready(handle)

    def has_tail(self, handle: PrefixHandle) -> bool:
        """Whether a prefix holds a page beside those that the request uses; see `without_tail`."""
        return handle.tail is not None or (
            handle.state is not None and handle.state.tail is not None
        )

    def num_ready(self, handle: PrefixHandle) -> int:
        """Tokens of a prefix that a request need not compute."""
        if self.states is None:
            return handle.num_tokens(self.page_size)
        return 0 if handle.state is None else handle.state.num_tokens(self.page_size)

    def forget_prefix(self, request: Request) -> None:
        """Forgets the prefix found for a request that now runs, or is over."""
        if self._sought is not None and self._sought[0] is request:
            self._sought = self._touched = None

    def available_beside(self, handle: PrefixHandle) -> int:
        """Pages that can be allocated once a request holds the prefix found for it."""
        return self.num_available - self._cache.num_unused(handle)

    def touch_prefix(self, request: Request, handle: PrefixHandle) -> None:
        """Makes the prefix found for a waiting request the last to be evicted; once a request."""
        if self._touched is not request:
            self._touched = request
            self._cache.hold(handle)
            self._cache.release(handle)

    def start(self, request: Request, handle: PrefixHandle, count: int) -> list[PageCopy]:
        """Gives a request the prefix found for it, and `count` pages of its own.

        Returns the copies that the device must make before the request computes: if the prefix ends
        in a cached tail, the request extends a copy of that page.
        """
        self.forget_prefix(request)
        self._cache.hold(handle)
        if handle.state is not None:  # until `settle`
            self._cache.hold(handle.state)
            self._copied.append(handle.state)
        request.pages = array("i", handle.pages() + self._cache.allocate(count))
        request.num_computed = self.num_ready(handle)
        if request.num_retractions == 0:
            request.num_cached = request.num_computed
        if self.windows is not None:
            self._start_window(request, handle)
        if self.states is not None:
            page = None if handle.state is None else handle.state.last_page
            is_late = request.num_computed == request.kv_len
            self.states.start(request, page, is_late=is_late)
        handle = handle._replace(state=None)
        if handle.tail is None:
            self._handles[request.rid] = handle
            return []
        copy = PageCopy(handle.tail.page, request.pages[handle.num_pages])
        # The tail is held until the copy is dispatched; the request holds only the full pages.
        self._copied.append(handle)
        self._handles[request.rid] = self._cache.hold_again(handle)
        return [copy]

    def grow(self, request: Request, count: int) -> None:
        """Gives a running request more pages of its own."""
        request.pages.extend(self._cache.allocate(count))

    def share(
        self, request: Request, num_tokens: int, *, with_tail: bool, is_awaited: bool = False
    ) -> list[PageCopy]:
        """Lets other requests use the first `num_tokens` tokens of a running one.

        These tokens are computed, or will be in the dispatch that is being planned. With a tail, a
        partial last page is shared too and a state kept; the request then continues in a copy of
        that page. Returns the copies that the device must make after its prefill.
        """
        handle = self._handles[request.rid]
        if not self.is_sharing or not self._cache.is_current(handle):
            return []
        size = self.page_size
        num_full = num_tokens // size
        first = handle.num_pages
        handle = self._cache.extend(
            handle,
            request.tokens(first * size, num_full * size),
            request.pages[first:num_full],
            merge=False,
        )
        copies = []
        rest = request.tokens(num_full * size, num_tokens)
        is_wanted = with_tail and rest and handle.num_pages == num_full
        if is_wanted and not self._cache.has_tail(handle, rest) and self.num_available > 0:
            (own,) = self._cache.allocate(1)
            tail = self._cache.add_tail(handle, rest, request.pages[num_full])
            self._copied.append(tail)
            copies.append(PageCopy(request.pages[num_full], own))
            request.pages[num_full] = own
            if self.windows is not None:  # that of the tail is held until `settle`
                self.windows.attach(own)
        self._handles[request.rid] = handle
        if self.states is not None and with_tail and handle.num_pages == num_full:
            self._keep_state(request, handle, rest, on_trial=not is_awaited)
        return copies

    def _keep_state(
        self, request: Request, handle: PrefixHandle, rest: Sequence[int], *, on_trial: bool
    ) -> None:
        """Keeps the state behind a running request's prefill, if all of that is cached."""
        assert self.states is not None
        if rest and self._cache.has_tail(handle, rest):
            handle = self._cache.hold_tail(handle, rest)
            self._copied.append(handle)  # until it is computed
        elif rest or not handle.num_pages:
            return
        self.states.keep(request, handle.last_page, on_trial=on_trial)

    def branch(self, request: Request) -> int:
        """Tokens behind which a running request leaves a cached prefix, if no state is kept there.

        0 without, and if none can be kept.
        """
        if self.states is None or not self.states.has_room_on_trial:
            return 0
        num_shared = self.num_shared(request)
        return num_shared if request.num_computed < num_shared else 0

    def keeps_state(self, request: Request, num_tokens: int) -> bool:
        """Whether later prompts may go on from behind so many tokens of a running request.

        That is where it leaves a cached prefix, and the end of its prompt; prompts of less than a
        page are computed as fast as a state is copied.
        """
        if self.states is None or not self.states.has_room_on_trial:
            return False
        is_prompt = num_tokens == request.kv_len >= self.page_size and not request.output_ids
        return is_prompt or num_tokens == self.branch(request)

    def num_shared(self, request: Request) -> int:
        """Tokens of a running request whose keys are in pages that nobody writes to."""
        return self._handles[request.rid].num_pages * self.page_size

    def release(self, request: Request) -> None:
        """Takes all pages from a request; its full pages are given to the cache, or freed.

        They are freed without sharing, and if the cache was reset since the request got them.
        """
        handle = self._handles.pop(request.rid)
        size = self.page_size
        if self.windows is not None:
            first, end = self._spans.pop(request.rid)
            self.windows.let_go(request.pages[first:end], keep=True)
        page = None
        if self.is_sharing and self._cache.is_current(handle):
            first, num_full = handle.num_pages, request.num_computed // size
            handle = self._cache.extend(
                handle,
                request.tokens(first * size, num_full * size),
                request.pages[first:num_full],
                merge=True,
            )
            if self.states is not None:
                handle, page = self._end_of_state(request, handle)
        if self.states is not None:
            self.states.release(request, page)
        is_tail = handle.tail is not None
        self._allocator.free(request.pages[handle.num_pages + is_tail :])
        self._cache.release(handle)
        request.pages = array("i")
        request.num_computed = 0

    def _end_of_state(
        self, request: Request, handle: PrefixHandle
    ) -> tuple[PrefixHandle, int | None]:
        """Caches a last, partial page too; the last page of what a request has computed.

        None where its state is of no use: before its first token, or within shared pages. The
        handle becomes one with the tail, if the request's own page is that from now on.
        """
        num_full, size = handle.num_pages, self.page_size
        rest = request.tokens(num_full * size, request.num_computed)
        if request.num_computed < num_full * size or not request.num_computed:
            return handle, None
        if not rest:
            return handle, handle.last_page
        if self._cache.has_tail(handle, rest):
            tail = self._cache.hold_tail(handle, rest)
            page = tail.last_page
            self._cache.release(tail)
            return handle, page
        tail = self._cache.add_tail(handle, rest, request.pages[num_full])
        self._cache.release(handle)
        return tail, tail.last_page

    def reset_cache(self, adapter: int | None = None) -> int:
        """Empties the prefix cache (of one adapter's slot); returns the number of pages freed.

        Running requests keep the pages that they share until they end.
        """
        self.settle()
        if self.states is not None:
            self.states.forget_kept()
        if adapter is None:
            return self._cache.reset()
        return self._cache.reset_space(adapter - NO_ADAPTER)

    def settle(self) -> None:
        for handle in self._copied:
            if self.windows is not None and handle.tail is not None:
                self.windows.let_go([handle.tail.page], keep=True)
            self._cache.release(handle)
        self._copied.clear()
        if self.states is not None:
            self.states.settle()

    # ------------------------------------------------------------------ windows

    def window_need(self, request: Request) -> int:
        """The most window pages that a request needs while it runs, beside a chunk's."""
        if self.windows is None:
            return 0
        longest = self.pages_for(request.kv_len + request.num_remaining) + 1  # with a copied tail
        return min(longest, self.windows.sizes.per_request)

    def window_room(self, running: Iterable[Request]) -> int:
        """Window pages that are left even if running requests take the most they may need."""
        if self.windows is None:
            return 0
        sizes = self.windows.sizes
        return sizes.num_pages - sizes.for_prefill - sum(map(self.window_need, running))

    def open_window(self, request: Request, num_tokens: int) -> None:
        """Gives a running request its span's window pages, up to its first `num_tokens` tokens.

        Call it before the tokens are written.
        """
        if self.windows is None:
            return
        first, end = self._spans[request.rid]
        count = self.pages_for(num_tokens)
        for page in request.pages[end:count]:
            self.windows.attach(page)
        self._spans[request.rid] = first, max(end, count)

    def close_window(self, request: Request) -> None:
        """Releases the window pages that a running request's next query does not see."""
        if self.windows is None:
            return
        first, end = self._spans[request.rid]
        start = min(self.windows.first_needed(request.num_computed), end)
        own = max(first, min(start, self._handles[request.rid].num_pages))
        self.windows.let_go(request.pages[first:own], keep=True)
        self.windows.let_go(request.pages[own:start], keep=False)
        self._spans[request.rid] = max(first, start), end

    def _start_window(self, request: Request, handle: PrefixHandle) -> None:
        assert self.windows is not None
        first, end = self.windows.first_needed(request.num_computed), handle.num_pages
        for page in request.pages[first:end]:
            self.windows.hold(page)
        if handle.tail is not None:
            self.windows.hold(handle.tail.page)  # until `settle`
            self.windows.attach(request.pages[end])
            end += 1
        self._spans[request.rid] = first, end

    # ------------------------------------------------------------------ integrity

    def check_integrity(self, running: list[Request]) -> None:
        self._allocator.check_integrity()
        self._cache.check_integrity()
        if self.windows is not None:
            spans = [r.pages[slice(*self._spans[r.rid])] for r in running]
            tails = [[handle.tail.page] for handle in self._copied if handle.tail is not None]
            self.windows.check_integrity([*spans, *tails])
        if self.states is not None:
            self.states.check_integrity(running)
        if {r.rid for r in running} != set(self._handles):
            raise EngineError("the pool has other requests than the running batch")
        own: list[int] = []
        shared: set[int] = set()
        for request in running:
            num_shared = self._handles[request.rid].num_pages
            if request.pages[:num_shared].tolist() != self._handles[request.rid].pages():
                raise EngineError(f"request {request.rid} lost track of its shared pages")
            shared.update(request.pages[:num_shared])
            own.extend(request.pages[num_shared:])
        shared.update(page for _, page, _ in self._cache.prefixes())
        if len(set(own)) != len(own) or shared & set(own):
            raise EngineError("a KV page belongs to two owners")
        if len(own) + self.num_cached != self._allocator.num_used:
            raise EngineError(
                f"{len(own)} own + {self.num_cached} cached KV pages, "
                f"{self._allocator.num_used} in use"
            )
