"""Decode with draft tokens: a step verifies some of each row's drafts, in one forward pass.

Every position of a request draws its own token, with the random numbers that it would have without
drafts. A draft is right if it is that token. So drafts change how long tokens take, and not which
they are. Of drafts that are given as many are accepted as by rejection sampling (Leviathan et al.,
2023), which keeps the distribution; this keeps the samples. Keys of wrong drafts stay in their
slots, which the next tokens take.

Tokens of all rows are packed, so a step takes as long as it has tokens, and a row that has ended
leaves room for the drafts of others. There is a loop for each width; what the next step verifies
is decided at the end of a step, without the host.

Shape legend: B rows, T tokens of a step, W tokens of a row (its newest and its drafts), S stop ids.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgljax_engine.attention.base import AttentionOptions, BlockTables, NewTokens
from sgljax_engine.cache.kv_pages import KVPages, LayerKV
from sgljax_engine.cache.layer_states import VerifyState, put_states, take_states, verify_state
from sgljax_engine.config import TOKEN_BLOCK
from sgljax_engine.models.spec import Attend, LayerCache, Params, Pass, Recur
from sgljax_engine.runner.batches.batch import DecodeBatch
from sgljax_engine.runner.batches.page_ids import NO_SLOT
from sgljax_engine.runner.programs.attend import Pages, paged_attend, slots_at
from sgljax_engine.runner.programs.context import ProgramContext
from sgljax_engine.runner.programs.decode import (
    DecodeOutput,
    RowOptions,
    empty_extras,
    empty_output,
)
from sgljax_engine.runner.programs.drafts import (
    NUM_SOURCES,
    DraftBatch,
    Drafts,
    Match,
    choose_drafts,
    find_drafts,
    learn,
    may_pay,
    num_leading,
    read_drafts,
    row_drafts,
)
from sgljax_engine.runner.programs.prefill import with_routed
from sgljax_engine.runner.programs.recur import accept, verify_recur
from sgljax_engine.sampling.sampler import Sampled, SamplingBatch, sample
from sgljax_engine.sampling.table import SamplingTable, adjust_logits, record

NO_SOURCE = 0
"""Source of tokens that no draft foretold; others have 1 + one of `NUM_SOURCES`."""


class Verified(NamedTuple):
    """Results of a dispatch with drafts.

    Shape: sources: [tokens, B] int32, see `NO_SOURCE`. num_drafted, num_right: [NUM_SOURCES, B]
        int32. acceptance: See `DraftBatch`. num_steps: [number of widths] int32.
    """

    output: DecodeOutput
    sources: jax.Array
    num_drafted: jax.Array
    num_right: jax.Array
    acceptance: jax.Array
    num_steps: jax.Array


class _Carry(NamedTuple):
    caches: tuple[LayerCache, ...]
    routed: jax.Array | None
    input_ids: jax.Array
    table: SamplingTable | None
    text: jax.Array
    num_text: jax.Array
    pointer: jax.Array
    drafts: Drafts
    out: Verified


class _Packed(NamedTuple):
    """Tokens of a step, those of a row one after another.

    Shape: row, place: [T] int32, a token's row and its place among the row's. is_used: [T] bool.
        starts: [B] int32, each row's first token.
    """

    row: jax.Array
    place: jax.Array
    is_used: jax.Array
    starts: jax.Array


class _Passed(NamedTuple):
    """The state of a step that has done its forward pass, or will.

    Shape: sampled: Of each place of the widest step. is_done: Scalar bool.
    """

    caches: tuple[LayerCache, ...]
    routed: jax.Array | None
    sampled: Sampled
    is_done: jax.Array


def verify(
    params: Params,
    kv: KVPages,
    rows: DecodeBatch,
    sampling: SamplingBatch,
    options: RowOptions,
    drafts: DraftBatch,
    num_steps: jax.Array,
    max_finished: jax.Array,
    *,
    static: ProgramContext,
) -> tuple[KVPages, Verified]:
    """Generates tokens with up to `num_steps` forward passes in one dispatch; donates `kv`.

    `step_limits` of the rows are tokens. Ends early when no row can continue, when `max_finished`
    rows have finished for good, or when a row's pages are full. Reads keys from pages.
    """
    num_rows, max_tokens = rows.input_ids.shape[0], static.max_row_tokens
    widths = static.verify_widths(num_rows)
    assert drafts.costs.shape == (len(widths),), drafts.costs.shape
    limits = jnp.minimum(rows.step_limits, max_tokens)
    ends_at_limit = rows.ends_at_limit & (rows.step_limits <= max_tokens)
    run = _Run(params, rows, sampling, options, drafts, limits, widths, static)

    def keep_going(carry: _Carry) -> jax.Array:
        done, stopped = carry.out.output.num_tokens, carry.out.output.stopped
        at_limit = (done >= limits) & (limits > 0)
        num_finished = jnp.sum(stopped | (at_limit & ends_at_limit), dtype=jnp.int32)
        in_time = (jnp.sum(carry.out.num_steps) < num_steps) & (num_finished < max_finished)
        has_room = ~jnp.any(at_limit & ~ends_at_limit & ~stopped)
        return in_time & has_room & jnp.any(run.is_active(carry))

    no_counts = jnp.zeros((NUM_SOURCES, num_rows), jnp.int32)
    out = Verified(
        output=empty_output(num_rows, max_tokens, options.logprobs),
        sources=jnp.zeros((max_tokens, num_rows), jnp.int32),
        num_drafted=no_counts,
        num_right=no_counts,
        acceptance=drafts.acceptance,
        num_steps=jnp.zeros(len(widths), jnp.int32),
    )
    caches: tuple[LayerCache, ...] = kv.layers
    net = static.context.config.linear_attention
    if net is not None and rows.state_slots is not None:
        states = take_states(kv.states, rows.state_slots, rows.positions)
        most = 1 + row_drafts(widths[-1], static.drafts.num_drafts)
        by_token = static.recur_kernels is not None
        caches = (*caches, *(verify_state(net, x, most, by_token=by_token) for x in states))
    start = _Carry(
        caches=caches,
        routed=kv.routed,
        input_ids=rows.input_ids,
        table=options.table,
        text=drafts.text,
        num_text=drafts.num_text,
        pointer=jnp.full(num_rows, drafts.text.shape[1], jnp.int32),
        drafts=run.no_drafts(),
        out=out,
    )
    end = lax.while_loop(keep_going, run.step, run.with_drafts(start))
    layers = tuple(layer for layer in end.caches if isinstance(layer, LayerKV))
    states = kv.states
    if rows.state_slots is not None:
        new = tuple(layer.state for layer in end.caches if isinstance(layer, VerifyState))
        states = put_states(states, new, rows.state_slots)
    return KVPages(layers, end.routed, states), end.out


class _Run(NamedTuple):
    """Values that do not change during a dispatch."""

    params: Params
    rows: DecodeBatch
    sampling: SamplingBatch
    options: RowOptions
    drafts: DraftBatch
    limits: jax.Array
    widths: tuple[int, ...]
    static: ProgramContext

    def is_active(self, carry: _Carry) -> jax.Array:
        """Which rows [B] go on."""
        return (carry.out.output.num_tokens < self.limits) & ~carry.out.output.stopped

    def no_drafts(self) -> Drafts:
        """A step without drafts."""
        num_rows, num_drafts = (
            len(self.limits),
            row_drafts(self.widths[-1], self.static.drafts.num_drafts),
        )
        nothing, size = jnp.zeros(num_rows, jnp.int32), self.drafts.text.shape[1]
        return Drafts(
            tokens=jnp.zeros((num_rows, num_drafts), jnp.int32),
            counts=nothing,
            match=Match(nothing > 0, nothing + size, nothing, nothing),
            width=jnp.zeros((), jnp.int32),
            is_searched=jnp.array(False),
        )

    def with_drafts(self, carry: _Carry) -> _Carry:
        """Decides about the next step."""
        batch = self.drafts._replace(acceptance=carry.out.acceptance)
        active, num_drafts = self.is_active(carry), carry.drafts.tokens.shape[1]

        def choose() -> Drafts:
            search, vocab_size = self.static.drafts.search, self.static.context.config.vocab_size
            match = find_drafts(batch, carry.text, carry.num_text, carry.pointer, search)
            tokens, available = read_drafts(
                carry.text, carry.num_text, match, num_drafts, vocab_size
            )
            # The token behind the last right draft needs room too.
            room = self.limits - carry.out.output.num_tokens - 1
            available = jnp.clip(available, 0, jnp.maximum(room, 0))
            match = match._replace(exists=match.exists & (available > 0))
            return choose_drafts(batch, match, tokens, available, active, self.widths)

        pays = may_pay(batch, active, self.widths, num_drafts)
        return carry._replace(drafts=lax.cond(pays, choose, self.no_drafts))

    def step(self, carry: _Carry) -> _Carry:
        """A forward pass, and what follows from it."""
        packed = _pack(self.is_active(carry), carry.drafts.counts, self.widths[-1])
        shape, extras = packed.row.shape, self.options.logprobs
        numbers = jnp.zeros(shape, jnp.float32)
        nothing = Sampled(packed.row, numbers, numbers, numbers, empty_extras(shape, extras))
        passed = _Passed(carry.caches, carry.routed, nothing, jnp.array(False))
        for index in range(len(self.widths)):
            # A loop that runs once or never: it updates the caches in place, as a branch may not.
            passed = lax.while_loop(
                lambda passed, index=index: (carry.drafts.width == index) & ~passed.is_done,
                functools.partial(self._pass, index, carry, packed),
                passed,
            )
        found = self._accept(carry, packed, passed.sampled)
        caches = tuple(self._with_accepted(layer, found.num_tokens) for layer in passed.caches)
        carry = carry._replace(caches=caches, routed=passed.routed)
        return self.with_drafts(self._after(carry, packed, passed.sampled, found))

    def _with_accepted(self, layer: LayerCache, counts: jax.Array) -> LayerCache:
        """A layer's cache after the first `counts` [B] tokens of each row."""
        net = self.static.context.config.linear_attention
        if net is None or not isinstance(layer, VerifyState):
            return layer
        return accept(net, layer, counts, self.static.recur_kernels)

    def _pass(self, index: int, carry: _Carry, packed: _Packed, passed: _Passed) -> _Passed:
        """A forward pass of the width with that index."""
        width = self.widths[index]
        most = 1 + row_drafts(width, self.static.drafts.num_drafts) if index else 1
        row, place, is_used = (x[:width] for x in (packed.row, packed.place, packed.is_used))
        packed = _Packed(row, place, is_used, packed.starts)
        offset = carry.out.output.num_tokens[row] + place
        positions = self.rows.positions[row] + offset
        drafted = carry.drafts.tokens[row, jnp.maximum(place - 1, 0)]
        input_ids = jnp.where(place == 0, carry.input_ids[row], drafted)
        attend, slots = self._attend(carry, packed, positions, most)
        model, context = self.static.model, self.static.context
        tokens = Pass(
            input_ids,
            positions,
            attend,
            passed.caches,
            None if self.rows.adapters is None else self.rows.adapters[row],
            is_used if context.has_experts else None,
            self._recur(carry, packed, most),
        )
        out = model.forward(self.params, context, tokens)
        logits = model.logits(self.params, context, out.hidden, tokens.adapters)
        sampled = self._sample(logits, carry, packed, offset, most)
        # The last width has all places.
        sampled = jax.tree.map(lambda all_, new: all_.at[:width].set(new), passed.sampled, sampled)
        return _Passed(out.caches, with_routed(passed.routed, out, slots), sampled, jnp.array(True))

    def _attend(
        self, carry: _Carry, packed: _Packed, positions: jax.Array, most: int
    ) -> tuple[Attend, jax.Array]:
        """Attention of tokens, one by one or in blocks of a row's, and their slots."""
        rows, static = self.rows, self.static

        def slots_in(table: jax.Array) -> jax.Array:
            return slots_at(table[packed.row], positions, packed.is_used, static.page_size)

        slots, of_windows = slots_in(rows.page_table), None
        if rows.window_table is not None:
            of_windows = slots_in(rows.window_table)
        attention = static.attention
        if most == 1 or not attention.verifies_blocks:
            tables = BlockTables(
                page_table=rows.page_table[packed.row],
                positions=positions[:, None],
                kv_lens=jnp.where(packed.is_used, positions + 1, 0),
            )
            windows = None if rows.window_table is None else rows.window_table[packed.row]
            return paged_attend(attention, Pages.make(tables, slots, windows, of_windows)), slots
        first = rows.positions + carry.out.output.num_tokens
        num_keys = first + 1 + carry.drafts.counts
        size = -(-most // TOKEN_BLOCK) * TOKEN_BLOCK  # attention knows blocks of prefill's size
        number = jnp.arange(size, dtype=jnp.int32)[None]
        tables = BlockTables(
            page_table=rows.page_table,
            positions=first[:, None] + number,
            kv_lens=jnp.where(self.is_active(carry), num_keys, 0),
        )
        places = jnp.minimum(packed.starts[:, None] + number, len(packed.row) - 1).reshape(-1)
        is_there = (tables.positions < tables.kv_lens[:, None]).reshape(-1)

        def in_blocks(slots: jax.Array) -> jax.Array:
            return jnp.where(is_there, slots[places], NO_SLOT)

        window_slots = None if of_windows is None else in_blocks(of_windows)
        pages = Pages.make(tables, in_blocks(slots), rows.window_table, window_slots)
        by_blocks = paged_attend(attention, pages)
        back = packed.row * size + packed.place

        def attend_blocks(
            tokens: jax.Array | NewTokens, layer: LayerCache, options: AttentionOptions
        ) -> tuple[jax.Array, LayerCache]:
            is_new = isinstance(tokens, NewTokens)
            gathered = tokens.take(places) if is_new else tokens[places]
            out, layer = by_blocks(gathered, layer, options)
            return out[back], layer

        return attend_blocks, slots

    def _recur(self, carry: _Carry, packed: _Packed, most: int) -> Recur | None:
        """Recurrences over each row's tokens; None for models without."""
        net = self.static.context.config.linear_attention
        if net is None:
            return None
        number = jnp.arange(most, dtype=jnp.int32)[None]
        places = jnp.minimum(packed.starts[:, None] + number, len(packed.row) - 1)
        lens = jnp.where(self.is_active(carry), 1 + carry.drafts.counts, 0)
        back = packed.row * most + packed.place
        return verify_recur(net, places, lens, back, self.static.recur_kernels)

    def _sample(
        self,
        logits: jax.Array,
        carry: _Carry,
        packed: _Packed,
        offset: jax.Array,
        most: int,
    ) -> Sampled:
        """A token at each position, as if all drafts before it were right."""
        static, table, adjusted = self.static, carry.table, None
        sampling = jax.tree.map(lambda x: x[packed.row], self.sampling)
        if table is not None:
            drafted = carry.drafts.tokens[packed.row]

            def add(number: jax.Array, table: SamplingTable) -> SamplingTable:
                return record(table, drafted[:, number], packed.place > number)

            of_tokens = jax.tree.map(lambda x: x[packed.row], table)
            table = lax.fori_loop(0, most - 1, add, of_tokens)
            num_output = sampling.step + offset
            adjusted = adjust_logits(logits, table, sampling.stop_ids, num_output)
        others = self.options.logprobs
        if others is not None:
            others = others._replace(token_ids=others.token_ids[packed.row])
        shards, sampler = static.num_vocab_shards, static.sampler
        return sample(logits, sampling, offset, adjusted, shards, sampler, others)

    def _accept(self, carry: _Carry, packed: _Packed, sampled: Sampled) -> _Accepted:
        """Keeps a row's tokens up to the first that its draft differs from, or that ends it."""
        drafts, most = carry.drafts, 1 + carry.drafts.tokens.shape[1]
        places = packed.starts[:, None] + jnp.arange(most, dtype=jnp.int32)[None]
        places = jnp.minimum(places, len(sampled.token) - 1)
        tokens = sampled.token[places]
        number = jnp.arange(most - 1, dtype=jnp.int32)[None]
        right = (tokens[:, :-1] == drafts.tokens) & (number < drafts.counts[:, None])
        num_right = num_leading(right)
        is_stop = jnp.any(tokens[:, :, None] == self.sampling.stop_ids[:, None], axis=2)
        is_stop |= jnp.isnan(sampled.logprob[places])
        first_stop = jnp.where(jnp.any(is_stop, axis=1), jnp.argmax(is_stop, axis=1), most)
        num_tokens = jnp.minimum(num_right, first_stop.astype(jnp.int32)) + 1
        active = self.is_active(carry)
        stopped = active & (first_stop < num_tokens)
        num_tokens = jnp.where(active, num_tokens, 0)
        return _Accepted(tokens, num_tokens, jnp.minimum(num_right, num_tokens), stopped)

    def _after(self, carry: _Carry, packed: _Packed, sampled: Sampled, found: _Accepted) -> _Carry:
        """Notes the tokens of a step."""
        out, drafts = carry.out, carry.drafts
        done = out.output.num_tokens
        row, place = packed.row, packed.place
        is_kept = packed.is_used & (place < found.num_tokens[row])
        where = jnp.where(is_kept, done[row] + place, out.sources.shape[0])

        def put(kept: jax.Array, new: jax.Array) -> jax.Array:
            return kept.at[where, row].set(new, mode="drop")

        output = DecodeOutput(
            token_ids=put(out.output.token_ids, sampled.token),
            logprobs=put(out.output.logprobs, sampled.logprob),
            scaled_logprobs=put(out.output.scaled_logprobs, sampled.scaled_logprob),
            processed_logprobs=put(out.output.processed_logprobs, sampled.processed_logprob),
            num_tokens=done + found.num_tokens,
            stopped=out.output.stopped | found.stopped,
            extras=jax.tree.map(put, out.output.extras, sampled.extras),
        )
        source = 1 + drafts.match.source[row]
        is_of = jnp.arange(NUM_SOURCES, dtype=jnp.int32)[:, None] == drafts.match.source[None]
        is_right = place < found.num_right[row]
        active = self.is_active(carry)
        out = Verified(
            output=output,
            sources=put(out.sources, jnp.where(is_right, source, NO_SOURCE)),
            num_drafted=out.num_drafted + is_of * drafts.counts[None],
            num_right=out.num_right + is_of * found.num_right[None],
            acceptance=learn(out.acceptance, drafts, found.num_right, active, found.stopped),
            num_steps=out.num_steps.at[drafts.width].add(1),
        )
        table = carry.table
        if table is not None:

            def add(number: jax.Array, table: SamplingTable) -> SamplingTable:
                return record(table, found.tokens[:, number], number < found.num_tokens)

            table = lax.fori_loop(0, found.tokens.shape[1], add, table)
        rows = jnp.arange(len(done), dtype=jnp.int32)
        text_end = carry.text.shape[1]
        behind = jnp.where(is_kept, carry.num_text[row] + place, text_end)
        newest = found.tokens[rows, jnp.maximum(found.num_tokens - 1, 0)]
        return carry._replace(
            input_ids=jnp.where(found.num_tokens > 0, newest, carry.input_ids),
            table=table,
            text=carry.text.at[row, behind].set(sampled.token, mode="drop"),
            num_text=carry.num_text + found.num_tokens,
            pointer=jnp.minimum(drafts.match.place + found.num_tokens, text_end),
            out=out,
        )


class _Accepted(NamedTuple):
    """Tokens that a step adds to each row.

    Shape: tokens: [B, W] int32. num_tokens, num_right: [B] int32, tokens to keep, and those of them
        that were drafts. stopped: [B] bool.
    """

    tokens: jax.Array
    num_tokens: jax.Array
    num_right: jax.Array
    stopped: jax.Array


def _pack(active: jax.Array, counts: jax.Array, width: int) -> _Packed:
    """Places of the newest tokens and drafts of active rows in a step of that width."""
    sizes = jnp.where(active, 1 + counts, 0)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    token = jnp.arange(width, dtype=jnp.int32)
    row = jnp.sum(token[:, None] >= ends[None], axis=1, dtype=jnp.int32)
    is_used = row < len(active)
    row = jnp.minimum(row, len(active) - 1)
    starts = ends - sizes
    place = jnp.where(is_used, token - starts[row], 0)
    return _Packed(row, place, is_used, starts)
