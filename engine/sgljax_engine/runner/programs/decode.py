"""The decode program: steps of q tokens a row, in one dispatch.

Without drafts q is 1. With drafts a step takes a row's newest token and q - 1 drafts through the
model together, and keeps the drafts that are right. Every position of a request draws its own
token, with the random numbers that it would have without drafts; a draft is right if it is that
token. So drafts change how long tokens take, and not which they are. Of drafts that are given as
many are accepted as by rejection sampling (Leviathan et al., 2023), which keeps the distribution;
this keeps the samples. Keys of wrong drafts stay in their slots, which the next tokens take.

Shape legend: B rows, q tokens of a row in a step, T = B q, S stop ids.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgljax_engine.attention.base import AttentionOptions, BlockTables, NewTokens
from sgljax_engine.cache.kv_pages import KVPages, LayerKV
from sgljax_engine.cache.layer_states import (
    LayerState,
    VerifyState,
    gather_states,
    scatter_states,
    verify_state,
)
from sgljax_engine.config import TOKEN_BLOCK
from sgljax_engine.kernels.runs import SharedRuns, find_runs, run_blocks
from sgljax_engine.models.spec import Attend, Forward, LayerCache, Params, Pass, Recur
from sgljax_engine.runner.batches.batch import DecodeBatch
from sgljax_engine.runner.batches.page_ids import NO_SLOT
from sgljax_engine.runner.programs.attend import Pages, paged_attend, slots_at
from sgljax_engine.runner.programs.context import ProgramContext
from sgljax_engine.runner.programs.drafts import (
    NUM_SOURCES,
    DraftBatch,
    Drafts,
    find_drafts,
    num_leading,
)
from sgljax_engine.runner.programs.prefill import with_routed
from sgljax_engine.runner.programs.recur import RowSlots, accept, row_recur, verify_recur
from sgljax_engine.sampling.allowed import AllowedBatch, forbid_others
from sgljax_engine.sampling.guide import ENDLESS
from sgljax_engine.sampling.logprobs import ExtraLogprobs, LogprobBatch
from sgljax_engine.sampling.masks import MaskBatch
from sgljax_engine.sampling.sampler import Sampled, SamplingBatch, sample
from sgljax_engine.sampling.table import SamplingTable, adjust_logits, record


class DraftOutput(NamedTuple):
    """What became of drafts.

    Shape: sources: [tokens, B] int32, 0 for tokens that no draft foretold, else 1 + one of
        `NUM_SOURCES`. num_drafted: [NUM_SOURCES, B] int32. num_steps: Scalar int32.
    """

    sources: jax.Array
    num_drafted: jax.Array
    num_steps: jax.Array


class DecodeOutput(NamedTuple):
    """Results of a decode dispatch. Row b's tokens are the first `num_tokens[b]` of column b.

    Shape: token_ids: [tokens, B] int32. logprobs, scaled_logprobs, processed_logprobs: [tokens, B]
        float32; see `sampler.Sampled`. num_tokens: [B] int32. stopped: [B] bool, whether the last
        token is one of the row's stop ids, or has a log-prob of NaN. extras: Leaves
        [tokens, B, ...]; None if no row asks for them. drafts: None without. masks: [tokens, B, N]
        int32, see `find_mask`; None if no row reports them.
    """

    token_ids: jax.Array
    logprobs: jax.Array
    scaled_logprobs: jax.Array
    processed_logprobs: jax.Array
    num_tokens: jax.Array
    stopped: jax.Array
    extras: ExtraLogprobs | None
    drafts: DraftOutput | None = None
    masks: jax.Array | None = None


class RowOptions(NamedTuple):
    """Options that only some batches need; None costs nothing.

    Attributes:
        table: Table of rows whose settings change logits.
        logprobs: Batch of rows that ask for further log-probs.
        masks: Batch of rows that report their sampling masks.
        allowed: Batch of rows that follow a grammar.
        min_shared_keys: Scalar int32. Neighbouring rows with so many first keys in the same pages
            read them together.
    """

    table: SamplingTable | None = None
    logprobs: LogprobBatch | None = None
    masks: MaskBatch | None = None
    allowed: AllowedBatch | None = None
    min_shared_keys: jax.Array | None = None


class _Text(NamedTuple):
    """What drafts are found in, and those of the next step.

    Shape: text: [B, N] int32. num_text: [B] int32, see `find_drafts`.
    """

    text: jax.Array
    num_text: jax.Array
    drafts: Drafts


class _Carry(NamedTuple):
    step: jax.Array
    caches: tuple[LayerCache, ...]
    routed: jax.Array | None
    input_ids: jax.Array
    table: SamplingTable | None
    output: DecodeOutput
    text: _Text | None


def decode(
    params: Params,
    kv: KVPages,
    rows: DecodeBatch,
    sampling: SamplingBatch,
    options: RowOptions,
    drafts: DraftBatch | None,
    num_steps: jax.Array,
    max_finished: jax.Array,
    *,
    static: ProgramContext,
) -> tuple[KVPages, DecodeOutput]:
    """Generates tokens with up to `num_steps` forward passes in one dispatch; donates `kv`.

    `step_limits` of the rows are tokens. Ends early when no row can continue, when `max_finished`
    rows have finished for good, or, with drafts, when a row's pages are full. Recurrent states of
    the rows leave their slots for the time of the dispatch, unless a kernel steps them there.
    """
    width = 1 if drafts is None else drafts.places.shape[0]
    runs = _find_runs(rows, width, options, static)
    in_slots = (
        rows.state_slots is not None
        and width == 1
        and static.context.kernels.steps_in_slots(kv.states[0].matrix)
    )
    run = _Run(params, rows, sampling, options, drafts, static, runs, in_slots)
    caches: tuple[LayerCache, ...] = kv.layers
    if rows.state_slots is not None:
        states = gather_states(kv.states, rows.state_slots, rows.positions, in_slots=in_slots)
        caches = (*caches, *map(run.before_steps, states))
    start = _Carry(
        step=jnp.zeros((), jnp.int32),
        caches=caches,
        routed=kv.routed,
        input_ids=rows.input_ids,
        table=options.table,
        output=run.empty_output(),
        text=run.first_text(),
    )

    def keep_going(carry: _Carry) -> jax.Array:
        at_limit = (carry.output.num_tokens >= rows.step_limits) & (rows.step_limits > 0)
        stopped = carry.output.stopped
        num_finished = jnp.sum(stopped | (at_limit & rows.ends_at_limit), dtype=jnp.int32)
        goes_on = (carry.step < num_steps) & (num_finished < max_finished)
        if drafts is not None:
            goes_on &= ~jnp.any(at_limit & ~rows.ends_at_limit & ~stopped)
        return goes_on & jnp.any(run.is_active(carry))

    end = lax.while_loop(keep_going, run.step, start)
    layers = tuple(cache for cache in end.caches if isinstance(cache, LayerKV))
    states = kv.states
    if rows.state_slots is not None:
        new = tuple(_state(cache) for cache in end.caches if not isinstance(cache, LayerKV))
        states = scatter_states(states, new, rows.state_slots, in_slots=in_slots)
    return KVPages(layers, end.routed, states), end.output


def _find_runs(
    rows: DecodeBatch, width: int, options: RowOptions, static: ProgramContext
) -> SharedRuns | None:
    """Rows, of `width` tokens, that share keys which are there before the dispatch."""
    least, config = options.min_shared_keys, static.context.config
    if least is None:
        return None
    size = run_blocks(config.num_heads, config.num_kv_heads, width)
    return find_runs(rows.page_table, rows.positions, static.page_size, least, size, width)


def _state(cache: LayerState | VerifyState) -> LayerState:
    return cache.state if isinstance(cache, VerifyState) else cache


class _Run(NamedTuple):
    params: Params
    rows: DecodeBatch
    sampling: SamplingBatch
    options: RowOptions
    drafts: DraftBatch | None
    static: ProgramContext
    runs: SharedRuns | None
    in_slots: bool
    """Whether a kernel steps recurrent states in their slots."""

    @property
    def width(self) -> int:
        return 1 if self.drafts is None else self.drafts.places.shape[0]

    def per_token(self, x: jax.Array) -> jax.Array:
        """[B, ...] as [T, ...]."""
        return x if self.width == 1 else jnp.repeat(x, self.width, axis=0)

    def per_row(self, x: jax.Array) -> jax.Array:
        """[T, ...] as [B, q, ...]."""
        return x.reshape(-1, self.width, *x.shape[1:])

    @property
    def index_in_row(self) -> jax.Array:
        return jnp.arange(self.width, dtype=jnp.int32)[None]

    def is_active(self, carry: _Carry) -> jax.Array:
        active = (carry.output.num_tokens < self.rows.step_limits) & ~carry.output.stopped
        allowed = self.options.allowed
        return active if allowed is None else active & (carry.step < allowed.num_steps)

    # ------------------------------------------------------------------ the start

    def before_steps(self, state: LayerState) -> LayerCache:
        net = self.static.context.config.linear_attention
        if self.width == 1 or net is None:
            return state
        by_token = self.static.recur_kernels is not None
        return verify_state(net, state, self.width, by_token=by_token)

    def empty_output(self) -> DecodeOutput:
        num_rows, most = len(self.rows.input_ids), self.static.max_steps
        drafts = None
        if self.drafts is not None:
            most = self.static.max_row_tokens
            drafts = DraftOutput(
                jnp.zeros((most, num_rows), jnp.int32),
                jnp.zeros((NUM_SOURCES, num_rows), jnp.int32),
                jnp.zeros((), jnp.int32),
            )
        shape, masks = (most, num_rows), self.options.masks
        return DecodeOutput(
            token_ids=jnp.zeros(shape, jnp.int32),
            logprobs=jnp.zeros(shape, jnp.float32),
            scaled_logprobs=jnp.zeros(shape, jnp.float32),
            processed_logprobs=jnp.zeros(shape, jnp.float32),
            num_tokens=jnp.zeros(num_rows, jnp.int32),
            stopped=jnp.zeros(num_rows, bool),
            extras=_empty_extras(shape, self.options.logprobs),
            drafts=drafts,
            masks=None if masks is None else jnp.zeros((*shape, masks.ranks.shape[0]), jnp.int32),
        )

    def first_text(self) -> _Text | None:
        if self.drafts is None:
            return None
        text, nothing = self.drafts.text, jnp.zeros_like(self.drafts.num_text)
        return self.with_drafts(text, self.drafts.num_text, nothing + text.shape[1], nothing)

    def with_drafts(
        self, text: jax.Array, num_text: jax.Array, pointer: jax.Array, done: jax.Array
    ) -> _Text:
        """Finds the drafts of the next step; `done` [B] are tokens so far."""
        assert self.drafts is not None
        search, vocab_size = self.static.drafts.search, self.static.context.config.vocab_size
        found = find_drafts(self.drafts, text, num_text, pointer, search, vocab_size)
        # The token behind the last right draft needs room too.
        room = jnp.maximum(self.rows.step_limits - done - 1, 0)
        return _Text(text, num_text, found._replace(counts=jnp.minimum(found.counts, room)))

    # ------------------------------------------------------------------ a step

    def step(self, carry: _Carry) -> _Carry:
        """A forward pass, and what follows from it."""
        active = self.is_active(carry)
        counts = active.astype(jnp.int32)
        if carry.text is not None:
            counts = jnp.where(active, 1 + carry.text.drafts.counts, 0)
        logits, out, slots = self.next_logits(carry, active, counts)
        sampled = self.sample(logits, carry)
        kept = self.keep(carry, sampled, active)
        caches = out.caches
        if carry.text is not None:
            caches = tuple(self.with_accepted(cache, kept.num_tokens) for cache in caches)
        newest, text = sampled.token, None
        if carry.text is not None:
            last = jnp.maximum(kept.num_tokens - 1, 0)
            newest = jnp.take_along_axis(kept.tokens, last[:, None], axis=1)[:, 0]
            text = self.next_text(carry, carry.text, kept)
        return _Carry(
            step=carry.step + 1,
            caches=caches,
            routed=with_routed(carry.routed, out, slots),
            input_ids=jnp.where(active, newest, carry.input_ids),
            table=self.recorded(carry.table, kept),
            output=self.append(carry, sampled, kept),
            text=text,
        )

    def next_logits(
        self, carry: _Carry, active: jax.Array, counts: jax.Array
    ) -> tuple[jax.Array, Forward, jax.Array]:
        """One forward pass: logits [T, V], the pass, and slots [T]."""
        context, rows = self.static.context, self.rows
        first = rows.positions + carry.output.num_tokens
        positions = (first[:, None] + self.index_in_row).reshape(-1)
        input_ids, is_used = carry.input_ids, active
        if carry.text is not None:
            both = jnp.concatenate([input_ids[:, None], carry.text.drafts.tokens], axis=1)
            input_ids = jnp.maximum(both, 0).reshape(-1)
            is_used = (self.index_in_row < counts[:, None]).reshape(-1)
        attend, slots = self.attend(positions, is_used, first, counts)
        adapters = None if rows.adapters is None else self.per_token(rows.adapters)
        tokens = Pass(
            input_ids,
            positions,
            attend,
            carry.caches,
            adapters,
            is_used if context.has_experts else None,
            self.recur(carry, active, counts),
        )
        out = self.static.model.forward(self.params, context, tokens)
        logits = self.static.model.logits(self.params, context, out.hidden, adapters)
        return logits, out, slots

    def attend(
        self, positions: jax.Array, is_used: jax.Array, first: jax.Array, counts: jax.Array
    ) -> tuple[Attend, jax.Array]:
        """Attention of tokens, one by one or in blocks of a row's, and their slots."""
        rows, attention = self.rows, self.static.attention
        page_table = self.per_token(rows.page_table)
        window_table = None if rows.window_table is None else self.per_token(rows.window_table)

        def slots_in(table: jax.Array) -> jax.Array:
            return slots_at(table, positions, is_used, self.static.page_size)

        slots = slots_in(page_table)
        of_windows = None if window_table is None else slots_in(window_table)
        if self.width == 1 or not attention.verifies_blocks:
            tables = BlockTables(
                page_table=page_table,
                positions=positions[:, None],
                kv_lens=jnp.where(is_used, positions + 1, 0),
                runs=self.runs,
            )
            pages = Pages.make(tables, slots, window_table, of_windows)
            return paged_attend(attention, pages), slots
        size = -(-self.width // TOKEN_BLOCK) * TOKEN_BLOCK  # attention knows prefill's blocks
        more = size - self.width

        def padded(x: jax.Array, fill: int = 0) -> jax.Array:
            """[T, ...] as the tokens of blocks."""
            widths = ((0, 0), (0, more), *((0, 0) for _ in x.shape[1:]))
            x = jnp.pad(self.per_row(x), widths, constant_values=fill)
            return x.reshape(-1, *x.shape[2:])

        number = jnp.arange(size, dtype=jnp.int32)[None]
        tables = BlockTables(
            page_table=rows.page_table,
            positions=first[:, None] + number,
            kv_lens=jnp.where(counts > 0, first + counts, 0),
            runs=self.runs,
        )
        window_slots = None if of_windows is None else padded(of_windows, NO_SLOT)
        pages = Pages.make(tables, padded(slots, NO_SLOT), rows.window_table, window_slots)
        by_blocks = paged_attend(attention, pages)

        def attend(
            tokens: jax.Array | NewTokens, layer: LayerCache, options: AttentionOptions
        ) -> tuple[jax.Array, LayerCache]:
            is_new = isinstance(tokens, NewTokens)
            given = tokens.map(padded) if is_new else padded(tokens)
            out, layer = by_blocks(given, layer, options)
            out = out.reshape(-1, size, *out.shape[1:])[:, : self.width]
            return out.reshape(-1, *out.shape[2:]), layer

        return attend, slots

    def recur(self, carry: _Carry, active: jax.Array, counts: jax.Array) -> Recur | None:
        """Recurrences over each row's tokens; None for models without."""
        net, kernels = self.static.context.config.linear_attention, self.static.recur_kernels
        if net is None:
            return None
        if self.width > 1:
            return verify_recur(net, counts, self.width, kernels)
        slots = None
        if self.in_slots:
            assert self.rows.state_slots is not None
            is_first = self.rows.positions + carry.output.num_tokens == 0
            slots = RowSlots(self.rows.state_slots, is_first)
        return row_recur(net, active, self.static.context.kernels, slots)

    def with_accepted(self, cache: LayerCache, counts: jax.Array) -> LayerCache:
        """A layer's cache after the first `counts` [B] tokens of each row."""
        net = self.static.context.config.linear_attention
        if net is None or not isinstance(cache, VerifyState):
            return cache
        return accept(net, cache, counts, self.static.recur_kernels)

    def sample(self, logits: jax.Array, carry: _Carry) -> Sampled:
        """A token at each position, as if all drafts before it were right."""
        static, table, adjusted = self.static, carry.table, None
        sampling = jax.tree.map(self.per_token, self.sampling)
        offset = (carry.output.num_tokens[:, None] + self.index_in_row).reshape(-1)
        others = self.options.logprobs
        if others is not None:
            others = others._replace(token_ids=self.per_token(others.token_ids))
        masks = self.options.masks
        if masks is not None:
            masks = masks._replace(most=self.per_token(masks.most))
        if table is not None:
            table = jax.tree.map(self.per_token, table)
            if carry.text is not None:
                drafted = self.per_token(carry.text.drafts.tokens)
                place = jnp.tile(self.index_in_row[0], len(self.rows.input_ids))

                def add(number: jax.Array, table: SamplingTable) -> SamplingTable:
                    return record(table, drafted[:, number], place > number)

                table = lax.fori_loop(0, self.width - 1, add, table)
            adjusted = adjust_logits(logits, table, sampling.stop_ids, sampling.step + offset)
        shards, sampler = static.num_vocab_shards, static.sampler
        sampled = sample(logits, sampling, offset, adjusted, shards, sampler, others, masks)
        allowed = self.options.allowed
        if allowed is None:
            return sampled
        places = allowed.places

        def follow() -> Sampled:
            """Draws the rows with a grammar once more, alone: a row does not depend on others."""
            words = allowed.words.reshape(len(places), -1)
            logits_, sampling_, offset_, choices, others_, masks_ = jax.tree.map(
                lambda x: jnp.take(x, places, axis=0, mode="clip"),
                (
                    logits,
                    sampling,
                    offset,
                    logits if adjusted is None else adjusted,
                    None if others is None else others.token_ids,
                    None if masks is None else masks.most,
                ),
            )
            if others is not None:
                others_ = others._replace(token_ids=others_)
            if masks is not None:
                masks_ = masks._replace(most=masks_)
            choices = forbid_others(choices, words)
            drawn = sample(logits_, sampling_, offset_, choices, shards, sampler, others_, masks_)
            return jax.tree.map(lambda x, new: x.at[places].set(new, mode="drop"), sampled, drawn)

        goes_on = jnp.any(self.is_active(carry) & (allowed.num_steps < ENDLESS))
        return lax.cond(goes_on, follow, lambda: sampled)

    def keep(self, carry: _Carry, sampled: Sampled, active: jax.Array) -> _Kept:
        """Keeps a row's tokens up to the first that its draft differs from, or that ends it."""
        tokens = self.per_row(sampled.token)
        is_stop = jnp.any(tokens[:, :, None] == self.sampling.stop_ids[:, None], axis=2)
        is_stop |= self.per_row(jnp.isnan(sampled.logprob))
        if carry.text is None:
            stopped = active & is_stop[:, 0]
            return _Kept(
                tokens, active.astype(jnp.int32), jnp.zeros_like(active, jnp.int32), stopped
            )
        drafts = carry.text.drafts
        right = (tokens[:, :-1] == drafts.tokens) & (
            self.index_in_row[:, :-1] < drafts.counts[:, None]
        )
        num_right = num_leading(right)
        first_stop = num_leading(~is_stop)
        num_tokens = jnp.where(active, jnp.minimum(num_right, first_stop) + 1, 0)
        stopped = active & (first_stop < num_tokens)
        return _Kept(tokens, num_tokens, jnp.minimum(num_right, num_tokens), stopped)

    def recorded(self, table: SamplingTable | None, kept: _Kept) -> SamplingTable | None:
        if table is None:
            return None

        def add(number: jax.Array, table: SamplingTable) -> SamplingTable:
            return record(table, kept.tokens[:, number], number < kept.num_tokens)

        if self.width == 1:
            return add(jnp.int32(0), table)
        return lax.fori_loop(0, self.width, add, table)

    def append(self, carry: _Carry, sampled: Sampled, kept: _Kept) -> DecodeOutput:
        out, done = carry.output, carry.output.num_tokens
        if carry.text is None:

            def put(kept_: jax.Array, new: jax.Array) -> jax.Array:
                return kept_.at[carry.step].set(new)
        else:
            most, num_rows = out.token_ids.shape
            is_kept = self.index_in_row < kept.num_tokens[:, None]
            where = jnp.where(is_kept, done[:, None] + self.index_in_row, most).reshape(-1)
            row = self.per_token(jnp.arange(num_rows, dtype=jnp.int32))

            def put(kept_: jax.Array, new: jax.Array) -> jax.Array:
                return kept_.at[where, row].set(new, mode="drop")

        drafts = out.drafts
        if drafts is not None and carry.text is not None:
            source, counts = carry.text.drafts.source, carry.text.drafts.counts
            is_right = self.index_in_row < kept.num_right[:, None]
            sources = jnp.where(is_right, 1 + source[:, None], 0).reshape(-1)
            is_of = jnp.arange(NUM_SOURCES, dtype=jnp.int32)[:, None] == source[None]
            counts = jnp.where(kept.num_tokens > 0, counts, 0)
            drafts = DraftOutput(
                put(drafts.sources, sources),
                drafts.num_drafted + is_of * counts[None],
                drafts.num_steps + 1,
            )
        return DecodeOutput(
            token_ids=put(out.token_ids, sampled.token),
            logprobs=put(out.logprobs, sampled.logprob),
            scaled_logprobs=put(out.scaled_logprobs, sampled.scaled_logprob),
            processed_logprobs=put(out.processed_logprobs, sampled.processed_logprob),
            num_tokens=done + kept.num_tokens,
            stopped=out.stopped | kept.stopped,
            extras=jax.tree.map(put, out.extras, sampled.extras),
            drafts=drafts,
            masks=jax.tree.map(put, out.masks, sampled.mask),
        )

    def next_text(self, carry: _Carry, text: _Text, kept: _Kept) -> _Text:
        """The text with the kept tokens, and the drafts of the next step."""
        size = text.text.shape[1]
        is_kept = self.index_in_row < kept.num_tokens[:, None]
        behind = jnp.where(is_kept, text.num_text[:, None] + self.index_in_row, size)
        rows = jnp.arange(len(behind), dtype=jnp.int32)[:, None]
        return self.with_drafts(
            text.text.at[rows, behind].set(kept.tokens, mode="drop"),
            text.num_text + kept.num_tokens,
            jnp.minimum(text.drafts.place + kept.num_tokens, size),
            carry.output.num_tokens + kept.num_tokens,
        )


class _Kept(NamedTuple):
    """Tokens that a step adds to each row.

    Shape: tokens: [B, q] int32. num_tokens, num_right: [B] int32, tokens to keep, and those of them
        that were drafts. stopped: [B] bool.
    """

    tokens: jax.Array
    num_tokens: jax.Array
    num_right: jax.Array
    stopped: jax.Array


def _empty_extras(shape: tuple[int, ...], logprobs: LogprobBatch | None) -> ExtraLogprobs | None:
    """Empty further log-probs of that shape; None if no row asks for any."""
    if logprobs is None:
        return None
    num_top, num_ids = logprobs.ranks.shape[0], logprobs.token_ids.shape[1]
    return ExtraLogprobs(
        values=jnp.zeros((*shape, num_top), jnp.float32),
        token_ids=jnp.zeros((*shape, num_top), jnp.int32),
        chosen=jnp.zeros((*shape, num_ids), jnp.float32),
    )
