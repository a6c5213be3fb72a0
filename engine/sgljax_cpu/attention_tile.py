"""The arithmetic of attention for a tile of queries that share keys of a kv head.

Pages are read in place, each key and value once for all queries of the tile. Keys are processed in
*spans*, with an online softmax over these (Milakov and Gimelshein, 2018): first the scores of a
span, then its exponentials, then its values, so that scores stay in the nearest cache. A hidden key
adds an exact 0 to a query's sums, or a term that is multiplied by an exact 0 once the query sees a
key. So the bits of a query do not depend on its tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sgljax_cpu.emit import (
    F32,
    I32,
    I64,
    PTR,
    Code,
    Number,
    Value,
    Variable,
    f32,
    vector,
)
from sgljax_cpu.math import add_neighbours, exp, tanh
from sgljax_cpu.numbers import STORED, load_as_float

SPAN = 256
"""Keys whose scores are in memory together."""

_SUMS = 16
"""Vectors of weighted values that are added up together. Reading values once is worth more than
having all sums in registers, where AVX2 and ARM64 have few."""

_SUMS_OF_RUN = 8
"""The same for a run, whose values are in the caches."""

_UNROLLED = 128
"""Channels times queries up to which the loop over the keys of a vector is unrolled."""

_TILE_HEADS = 16
"""Query heads of a kv head that are in a tile together; more are divided, as latents have."""

_MASKED = -1e30

_LINE = 16
"""Floats of a cache line."""


class AttentionShape(NamedTuple):
    """The shape that a kernel is compiled for. Hashable.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Channels of a head, a multiple of the lanes.
        page_size: Tokens of a page.
        scale: Multiplies scores.
        window: A token sees this many newest keys, its own included; None for all.
        softcap: Scores s become `softcap * tanh(s / softcap)`; None for no cap.
        dtype: Name of the dtype of keys and values in pages.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    scale: float
    window: int | None
    softcap: float | None
    dtype: str = "float32"

    @property
    def stored(self) -> str:
        """LLVM's type of the numbers in pages."""
        return STORED[self.dtype]

    @property
    def has_scales(self) -> bool:
        """Whether each key and value has a factor."""
        return self.dtype == "int8"

    @property
    def num_scales(self) -> int:
        """Arrays of scales, of keys and of values."""
        return 2 if self.has_scales else 0

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def tile_heads(self) -> int:
        """Query heads of a tile: those of a kv head, or an equal part of them."""
        if self.group <= _TILE_HEADS:
            return self.group
        return next(n for n in range(_TILE_HEADS, 0, -1) if self.group % n == 0)

    @property
    def num_parts(self) -> int:
        """Parts of the query heads, each of a tile's."""
        return self.num_heads // self.tile_heads


class Pages(NamedTuple):
    """Position of a request's keys of a kv head; values have the same positions in their array.

    Attributes:
        table: Address of the request's page ids, int32.
        head: The kv head.
        num_keys: i64, keys that exist.
        scales: Addresses of the arrays of keys' scales and of values'; empty without.
    """

    code: Code
    shape: AttentionShape
    table: Value
    head: Value
    num_keys: Value
    scales: Sequence[Value] = ()

    def key(self, pages: Value, index: Value) -> Value:
        """The address of a key."""
        token = self._token(index)
        return self.code.at(pages, self.code.mul(token, self.shape.head_dim), self.shape.stored)

    def copy_scales(self, scales: Value, first: Value, to: Value, lanes: int) -> None:
        """Emits the copying of a vector's scales to memory, of keys as of `vector_of`."""
        code, last = self.code, self.code.sub(self.num_keys, 1)
        if self.shape.page_size % lanes == 0:
            whole = code.mul(code.div(code.min(first, last), lanes), lanes)
            found = code.load(code.at(scales, self._token(whole)), vector(lanes), 4)
            code.store(found, to, 4)
            return
        with code.loop(0, lanes) as index:
            token = self._token(code.min(code.add(first, index), last))
            code.store(code.load(code.at(scales, token), F32), code.at(to, index))

    def _token(self, index: Value) -> Value:
        """The place of a key among all keys of all heads."""
        code, size = self.code, self.shape.page_size
        page = code.load(code.at(self.table, code.div(index, size), I32), I32)
        row = code.mul(code.convert("sext", page, I64), self.shape.num_kv_heads)
        return code.add(code.mul(code.add(row, self.head), size), code.rem(index, size))

    def vector_of(self, pages: Value, first: Value, count: int, places: Value) -> KeyVector:
        """`count` keys from a multiple of it on; the last existing key replaces missing ones.

        `places` is memory for `count` addresses.
        """
        code, head_dim = self.code, self.shape.head_dim
        last = code.sub(self.num_keys, 1)
        if self.shape.page_size % count == 0:
            whole = code.mul(code.div(code.min(first, last), count), count)
            return KeyVector(code, self.shape, self.key(pages, whole), head_dim)
        with code.loop(0, count) as index:
            key = self.key(pages, code.min(code.add(first, index), last))
            code.store(key, code.at(places, index, PTR))
        return KeyVector(code, self.shape, places, None)


class KeyVector(NamedTuple):
    """A vector of keys, one for each lane.

    Attributes:
        base: Address of the first key, or of a list of all their addresses.
        stride: Numbers from one key to the next; None if `base` lists addresses.
    """

    code: Code
    shape: AttentionShape
    base: Value
    stride: int | None

    def address(self, index: Number) -> Value:
        """The address of one of the keys."""
        code = self.code
        if self.stride is None:
            return code.load(code.at(self.base, index, PTR), PTR)
        return code.at(self.base, code.mul(index, self.stride), self.shape.stored)

    def channels(self, key: Value, channel: int, lanes: int) -> Value:
        """Some channels of a key at an address, as float32."""
        code, shape = self.code, self.shape
        return load_as_float(code, code.at(key, channel, shape.stored), shape.dtype, lanes)


class Queries(NamedTuple):
    """A tile of queries; the heads of a group are adjacent.

    Attributes:
        vectors: Address of [len(ends), head_dim] floats, scaled.
        ends: For each query an i64, the first key past those it sees.
        last_end: The largest of them, at least 1.
        first_end: The smallest of them.
    """

    vectors: Value
    ends: list[Value]
    last_end: Value
    first_end: Value


class Softmax(NamedTuple):
    """The running softmax of some queries, in memory: weighted values, their total, the peak.

    Attributes:
        code: The function that is being written.
        base: Address of a record of `size` floats for each query.
        head_dim: Channels of a value.
        lanes: Of the totals, which are added up at last.
    """

    code: Code
    base: Value
    head_dim: int
    lanes: int

    @staticmethod
    def size_of(head_dim: int, lanes: int) -> int:
        """Floats of a query."""
        return head_dim + 2 * lanes

    def sums(self, query: int, channel: Number = 0) -> Value:
        """The address of a query's weighted values."""
        record = query * self.size_of(self.head_dim, self.lanes)
        return self.code.at(self.code.at(self.base, record), channel)

    def total(self, query: int) -> Value:
        """The address of a query's total, by lanes."""
        return self.sums(query, self.head_dim)

    def peak(self, query: int) -> Value:
        """The address of a query's highest score."""
        return self.sums(query, self.head_dim + self.lanes)

    def start(self, count: int, sinks: Sequence[Value]) -> None:
        """Emits the start of `count` queries: no keys, or their sinks, whose values add nothing."""
        code, lanes = self.code, self.lanes
        total = code.zeros(lanes)
        if sinks:
            one = code.first_lanes(Value(I64, "1"), lanes)
            total = code.select(one, code.splat(f32(1.0), lanes), total)
        for query in range(count):
            with code.loop(0, self.head_dim, lanes) as channel:
                code.store(code.zeros(lanes), self.sums(query, channel), 4)
            code.store(total, self.total(query), 4)
            code.store(sinks[query] if sinks else f32(_MASKED), self.peak(query))

    def finish(self, count: int) -> None:
        """Emits the division of `count` queries' weighted values by their totals."""
        code, lanes = self.code, self.lanes
        for query in range(count):
            sums = code.load(self.total(query), vector(lanes), 4)
            total = code.splat(code.sum_lanes(sums), lanes)
            with code.loop(0, self.head_dim, lanes) as channel:
                place = self.sums(query, channel)
                mean = code.float_op("fdiv", code.load(place, vector(lanes), 4), total)
                code.store(mean, place, 4)


class Ahead(NamedTuple):
    """Says which keys of the next span a tile of a run brings into the caches: every `turns`th."""

    turn: Value
    turns: Value


class _Span(NamedTuple):
    """Keys that are processed together.

    Attributes:
        begin: Index of the first key.
        start: Where work starts within the span, at a whole vector.
        num_keys: Where work ends within the span.
        num_hidden: Number of first keys of the span that no query sees.
    """

    begin: Value
    start: Value
    num_keys: Value
    num_hidden: Value


class Attention:
    """Emits attention of a tile into the function that is being written."""

    def __init__(
        self,
        pages: Pages,
        k_pages: Value,
        v_pages: Value,
        queries: Queries,
        softmax: Softmax,
        ahead: Ahead | None = None,
    ) -> None:
        """Takes the keys and values of `pages` from `k_pages` and `v_pages`, whole arrays."""
        code, lanes = softmax.code, softmax.lanes
        self._code, self._lanes, self._shape = code, lanes, pages.shape
        self._pages, self._k_pages, self._v_pages = pages, k_pages, v_pages
        self._queries, self._softmax, self._ahead = queries, softmax, ahead
        self._count = count = len(queries.ends)
        self._scores = code.stack(f"[{count * SPAN} x float]")
        self._by_lane = code.stack(f"[{count * lanes * lanes} x float]")
        self._scales = [code.stack(f"[{SPAN} x float]") for _ in pages.scales]
        self._places = [code.stack(f"[{lanes} x ptr]") for _ in range(2)]
        self._peaks = [code.variable(code.load(softmax.peak(i), F32)) for i in range(count)]
        self._totals = [
            code.variable(code.load(softmax.total(i), vector(lanes), 4)) for i in range(count)
        ]

    def add_keys(self, begin: Value, end: Value) -> None:
        """Emits what adds keys to the softmax, from `begin`, a multiple of `SPAN`, to `end`."""
        code, lanes = self._code, self._lanes
        first = Value(I64, "0")
        if self._shape.window is not None:
            first = code.max(code.sub(self._queries.first_end, self._shape.window), 0)
        # Spans begin at fixed multiples, so that a query's sums do not depend on other queries.
        start = code.max(begin, code.mul(code.div(first, SPAN), SPAN))
        with code.loop(start, end, SPAN) as begin:
            count = code.min(code.sub(end, begin), SPAN)
            hidden = code.max(code.sub(first, begin), 0)
            start = code.mul(code.div(hidden, lanes), lanes)
            span = _Span(begin, start, count, hidden)
            shrinks = self._exponentiate(span, self._score(span))
            self._add_values(span, shrinks)
        for row in range(self._count):
            code.store(self._peaks[row].get(), self._softmax.peak(row))
            code.store(self._totals[row].get(), self._softmax.total(row), 4)

    # ------------------------------------------------------------------ scores

    def _score(self, span: _Span) -> list[Value]:
        """Emits a span's scores, `_MASKED` for hidden keys; returns each query's peak by lane."""
        code, lanes = self._code, self._lanes
        masked = code.splat(f32(_MASKED), lanes)
        highest = [code.variable(masked) for _ in range(self._count)]
        with code.loop(span.start, span.num_keys, lanes) as at:
            first = code.add(span.begin, at)
            if self._ahead is not None:
                self._prefetch(self._ahead, code.add(first, SPAN))
            keys, following = self._two_vectors(self._k_pages, first)
            for scales, own in zip(self._pages.scales, self._scales, strict=True):
                self._pages.copy_scales(scales, first, code.at(own, at), lanes)
            for row, scores in enumerate(self._products(keys, following)):
                scores = self._scaled(scores, 0, at)
                if self._shape.softcap is not None:
                    cap = code.splat(f32(self._shape.softcap), lanes)
                    scores = tanh(code, code.float_op("fdiv", scores, cap))
                    scores = code.float_op("fmul", cap, scores)
                scores = code.select(self._is_seen(row, first), scores, masked)
                code.store(scores, code.at(self._scores, code.add(at, row * SPAN)), 4)
                highest[row].set(code.float_max(highest[row].get(), scores))
        return [each.get() for each in highest]

    def _prefetch(self, ahead: Ahead, first: Value) -> None:
        """Emits prefetches of a vector's keys and values, of those that are this tile's turn."""
        code = self._code
        for pages in (self._k_pages, self._v_pages):
            found = self._pages.vector_of(pages, first, self._lanes, self._places[1])
            with code.loop(ahead.turn, self._lanes, ahead.turns) as index:
                place = found.address(index)
                for channel in range(0, self._shape.head_dim, _LINE):
                    code.prefetch(code.at(place, channel, self._shape.stored))

    def _scaled(self, x: Value, kind: int, at: Value) -> Value:
        """A vector of scores times the scales of keys, kind 0, or of weights times those of values.

        Unchanged without scales.
        """
        if not self._scales:
            return x
        scales = self._code.load(self._code.at(self._scales[kind], at), vector(self._lanes), 4)
        return self._code.float_op("fmul", x, scales)

    def _two_vectors(self, pages: Value, first: Value) -> tuple[KeyVector, KeyVector]:
        """One vector of keys or values, and the next one."""
        vectors = []
        for places, distance in zip(self._places, (0, self._lanes), strict=True):
            at = self._code.add(first, distance)
            vectors.append(self._pages.vector_of(pages, at, self._lanes, places))
        return vectors[0], vectors[1]

    def _is_seen(self, row: int, first: Value) -> Value:
        """Whether a query sees each key of a vector that starts at `first`."""
        code, lanes, end = self._code, self._lanes, self._queries.ends[row]
        is_seen = code.first_lanes(code.sub(end, first), lanes)
        if self._shape.window is None:
            return is_seen
        oldest = code.sub(code.sub(end, self._shape.window), first)
        limit = code.splat(code.convert("trunc", oldest, I32), lanes)
        return code.both(is_seen, code.compare("sge", code.lane_numbers(lanes), limit))

    def _products(self, keys: KeyVector, following: KeyVector) -> list[Value]:
        """Scores of each query, one lane per key."""
        code, lanes = self._code, self._lanes
        if self._shape.head_dim * self._count <= _UNROLLED:
            return self._totals_of(
                [self._products_by_lane(keys, following, i) for i in range(lanes)]
            )
        with code.loop(0, lanes) as index:
            for row, products in enumerate(self._products_by_lane(keys, following, index)):
                place = code.mul(code.add(index, row * lanes), lanes)
                code.store(products, code.at(self._by_lane, place), 4)
        by_key = [
            [
                code.load(code.at(self._by_lane, (row * lanes + i) * lanes), vector(lanes), 4)
                for row in range(self._count)
            ]
            for i in range(lanes)
        ]
        return self._totals_of(by_key)

    def _totals_of(self, by_key: Sequence[Sequence[Value]]) -> list[Value]:
        """For each query a vector: lane i is the sum over the lanes of the query's `by_key[i]`.

        The two halves of the keys are joined last, to keep few sums in registers at once.
        """
        if len(by_key) == 1:
            return list(by_key[0])
        half = len(by_key) // 2
        pairs = zip(self._totals_of(by_key[:half]), self._totals_of(by_key[half:]), strict=True)
        return [add_neighbours(self._code, a, b, half, self._lanes) for a, b in pairs]

    def _products_by_lane(
        self, keys: KeyVector, following: KeyVector, index: Number
    ) -> list[Value]:
        """Product of one key with each query; its sum over lanes is the score."""
        code, lanes, head_dim = self._code, self._lanes, self._shape.head_dim
        key, later = keys.address(index), following.address(index)
        sums: list[Value] = []
        for channel in range(0, head_dim, lanes):
            if channel % _LINE == 0:
                code.prefetch(code.at(later, channel, self._shape.stored))
            part = keys.channels(key, channel, lanes)
            for row in range(self._count):
                place = code.at(self._queries.vectors, row * head_dim + channel)
                query = code.load(place, vector(lanes), 4)
                if channel == 0:
                    sums.append(code.float_op("fmul", query, part))
                else:
                    sums[row] = code.fma(query, part, sums[row])
        return sums

    # ------------------------------------------------------------------ weights

    def _exponentiate(self, span: _Span, highest: Sequence[Value]) -> list[Value]:
        """Turns a span's scores into weights for the new peaks; returns factors of older sums."""
        code, lanes = self._code, self._lanes
        shrinks = []
        for row, highest_lanes in enumerate(highest):
            old = self._peaks[row].get()
            peak = code.float_max(old, code.max_lanes(highest_lanes))
            self._peaks[row].set(peak)
            peaks = code.splat(peak, lanes)
            shrink = exp(code, code.float_op("fsub", code.splat(old, lanes), peaks))
            shrinks.append(shrink)
            total = self._totals[row]
            total.set(code.float_op("fmul", total.get(), shrink))
            with code.loop(span.start, span.num_keys, lanes) as at:
                place = code.at(self._scores, code.add(at, row * SPAN))
                below = code.float_op("fsub", code.load(place, vector(lanes), 4), peaks)
                weights = exp(code, below)
                code.store(self._scaled(weights, 1, at), place, 4)
                total.set(code.float_op("fadd", total.get(), weights))
        return shrinks

    # ------------------------------------------------------------------ values

    def _add_values(self, span: _Span, shrinks: Sequence[Value]) -> None:
        """Adds a span's weighted values to the sums, a few channels of all queries at a time."""
        width = self._shape.head_dim // self._lanes
        at_once = max((_SUMS if self._ahead is None else _SUMS_OF_RUN) // self._count, 1)
        for begin in range(0, width, at_once):
            parts = range(begin, min(begin + at_once, width))
            self._add_channels(span, shrinks, [part * self._lanes for part in parts])

    def _add_channels(self, span: _Span, shrinks: Sequence[Value], channels: Sequence[int]) -> None:
        code, lanes, rows = self._code, self._lanes, range(self._count)
        places = [[self._softmax.sums(row, c) for c in channels] for row in rows]
        sums: list[list[Variable]] = []
        for row in rows:
            kept = [code.load(place, vector(lanes), 4) for place in places[row]]
            sums.append([code.variable(code.float_op("fmul", x, shrinks[row])) for x in kept])
        with code.loop(span.start, span.num_keys, lanes) as at:
            values, following = self._two_vectors(self._v_pages, code.add(span.begin, at))
            is_whole = code.both(
                code.less(code.add(at, lanes - 1), span.num_keys),
                code.compare("sge", at, span.num_hidden),
            )
            with code.when(is_whole), code.loop(0, lanes, 4) as index:
                for i in range(4):
                    self._add_value(at, code.add(index, i), values, following, channels, sums)
            # Memory of a hidden key may hold anything, and 0 times NaN is not 0.
            first = code.max(code.sub(span.num_hidden, at), 0)
            last = code.min(code.sub(span.num_keys, at), lanes)
            with code.unless(is_whole), code.loop(first, last) as index:
                self._add_value(at, index, values, following, channels, sums)
        for row in rows:
            for place, total in zip(places[row], sums[row], strict=True):
                code.store(total.get(), place, 4)

    def _add_value(
        self,
        at: Value,
        index: Value,
        values: KeyVector,
        following: KeyVector,
        channels: Sequence[int],
        sums: Sequence[Sequence[Variable]],
    ) -> None:
        code, lanes = self._code, self._lanes
        value, later = values.address(index), following.address(index)
        factors = []
        for row in range(self._count):
            place = code.add(code.add(at, index), row * SPAN)
            factors.append(code.splat(code.load(code.at(self._scores, place), F32), lanes))
        for place, channel in enumerate(channels):
            if channel % _LINE == 0:
                code.prefetch(code.at(later, channel, self._shape.stored))
            part = values.channels(value, channel, lanes)
            for row in range(self._count):
                total = sums[row][place]
                total.set(code.fma(factors[row], part, total.get()))
