"""Chooses an engine of a group for each request: by prefix, then by load. Any thread; no JAX.

Samples of a prompt, and the turns of an episode, should share a prefix cache; but no engine may
stand idle for the sake of that. SGLang's router weighs the two in the same way (its options
`cache_threshold` and `balance_abs_threshold`).
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from sgljax_engine.types import Request

MAX_LOAD_GAP = 16
"""How many more requests than the least loaded an engine may have and still get one for its prefix.

This is a common group size of GRPO: smaller groups stay together, larger ones use several engines,
each of which prefills their prompt once.
"""

MIN_MATCH = 0.5
"""Part of a prompt that an engine must know: a template that all prompts share decides nothing."""

MAX_BLOCKS = 1 << 16
"""Blocks of tokens that are remembered; the least recently used ones go first."""


class Router:
    """Knows how many requests each engine has, and which prefixes.

    Prefixes are chains of hashes of token blocks, so equal hashes of different prompts are
    possible: a request then runs on an engine that has not its prefix.
    """

    def __init__(self, num_engines: int, block_size: int, max_rows: int) -> None:
        """All engines are idle.

        Args:
            num_engines: Number of engines.
            block_size: Tokens that are hashed together; the size of a KV page.
            max_rows: Requests that one engine decodes together.
        """
        self._lock = threading.RLock()
        self._loads = [0] * num_engines
        self._block_size = block_size
        self._max_rows = max_rows
        self._holders: OrderedDict[int, int] = OrderedDict()
        self._next = 0

    @property
    def loads(self) -> tuple[int, ...]:
        """Unfinished requests of each engine."""
        with self._lock:
            return tuple(self._loads)

    @property
    def num_blocks(self) -> int:
        """Blocks that are remembered."""
        return len(self._holders)

    # ------------------------------------------------------------------ requests come and go

    def route(self, requests: Sequence[Request]) -> list[int]:
        """An engine for each request, whose load it is from now on."""
        if len(self._loads) == 1:
            return [0] * len(requests)
        places: list[int] = []
        chain: list[int] = []
        last: Request | None = None
        with self._lock:
            for request in requests:
                if last is None or not _same_prompt(request, last):
                    chain = self._chain(request, request.prompt_ids)
                    last = request
                place = self._choose(chain)
                self._loads[place] += 1
                self._remember(chain, place)
                places.append(place)
        return places

    def finished(self, request: Request) -> None:
        """A request is over. Its engine has its tokens, with which the next turn may begin."""
        if len(self._loads) == 1:
            return
        tokens = request.prompt_ids + request.output_ids
        with self._lock:
            self._loads[request.engine] -= 1
            if request.output_ids:
                self._remember(self._chain(request, tokens), request.engine)

    def moved(self, request: Request, target: int) -> None:
        """A request goes from its engine to another one."""
        with self._lock:
            self._loads[request.engine] -= 1
            self._loads[target] += 1
            self._remember(self._chain(request, request.prompt_ids), target)

    # ------------------------------------------------------------------ moves

    @property
    def has_free_rows(self) -> bool:
        """Whether an engine could start a request at once, as far as rows are concerned."""
        return min(self._loads) < self._max_rows

    def pick_move(self, source: int, num_waiting: int) -> tuple[int, int] | None:
        """The engine that should take over waiting requests, and how many; None for none.

        It takes half of the difference at most, so that nothing moves back.
        """
        with self._lock:
            target = self._loads.index(min(self._loads))
            most = min(num_waiting, self._max_rows - self._loads[target])
            count = min(most, (self._loads[source] - self._loads[target]) // 2)
        return (target, count) if count > 0 else None

    # ------------------------------------------------------------------ prefixes

    def _choose(self, chain: Sequence[int]) -> int:
        holders, depth = 0, 0
        for depth, block in enumerate(chain, 1):
            found = self._holders.get(block)
            if found is None:
                depth -= 1
                break
            holders = found
        least = min(self._loads)
        if depth >= MIN_MATCH * len(chain):
            known = [place for place in range(len(self._loads)) if holders >> place & 1]
            best = min(known, key=self._loads.__getitem__, default=None)
            if best is not None and self._loads[best] < least + MAX_LOAD_GAP:
                return best
        count = len(self._loads)
        place = min(range(count), key=lambda i: (self._loads[i], (i - self._next) % count))
        self._next = (place + 1) % count  # so that an idle group uses all of its engines
        return place

    def _remember(self, chain: Sequence[int], place: int) -> None:
        for block in chain:
            self._holders[block] = self._holders.get(block, 0) | 1 << place
            self._holders.move_to_end(block)
        while len(self._holders) > MAX_BLOCKS:
            self._holders.popitem(last=False)

    def _chain(self, request: Request, tokens: Sequence[int]) -> list[int]:
        """A hash for each block of tokens, and all before it; of the last block too, if partial."""
        size, ids = self._block_size, array("q", tokens)
        chain, last = [], hash(request.lora)
        for start in range(0, len(ids), size):
            last = hash((last, ids[start : start + size].tobytes()))
            chain.append(last)
        return chain


def _same_prompt(a: Request, b: Request) -> bool:
    return a.lora == b.lora and (a.prompt_ids is b.prompt_ids or a.prompt_ids == b.prompt_ids)
