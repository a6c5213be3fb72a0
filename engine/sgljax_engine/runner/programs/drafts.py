"""Draft tokens on the device: found in texts, and shared out among the rows of a step.

A row has a *text*: reference sequences, and behind them its own tokens, which grow. A draft is what
follows the longest match of the row's last tokens in its text, as in prompt lookup decoding
(Saxena, 2023) and suffix decoding (Oliaro et al., arXiv 2411.04975). How many of a row's drafts a
step verifies is a matter of what they are worth: each step takes the *width* (tokens of all rows
together) that promises the most tokens per second, by the acceptance so far and measured costs.

Shape legend: B rows, N entries of a text, C entries of a chunk, D drafts of a row.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgljax_engine.config import DRAFTERS
from sgljax_engine.speculation.plan import (
    ACCEPTANCE_KINDS,
    HOPE,
    HOPE_RATE,
    MOST_CERTAIN,
    expected_right,
)
from sgljax_engine.speculation.texts import MATCHED_TOKENS

LONG_MATCH = 4
"""Matches of so many tokens have an acceptance of their own."""

TEXT_CHUNK = 512
"""Entries that the search takes at a time."""

NO_TOKEN = -1
"""Entry of a text without a token: between sequences, and at its end."""

NUM_SOURCES = len(DRAFTERS)
"""Parts of a text: history, siblings, own tokens; the places of their drafters in counts."""

_LEARNING_RATE = 0.25
_SHARED_RATE = 0.05
"""How much a row learns from a draft of another one: they answer alike."""

_MISS_RATE = 1 / 32
"""How fast the acceptance of a kind falls with each search that finds no such draft.

Where that is all of them, searching does not pay.
"""


class DraftBatch(NamedTuple):
    """Sources of the rows' drafts, and their worth.

    Shape (all [B] unless said): text: [B, N] int32, `NO_TOKEN` where there is none, as in the first
        `MATCHED_TOKENS` entries; behind those come whole chunks. ends: [B, 2] int32, where history
        and siblings end; own tokens begin at the second. num_text: int32, end of the own tokens.
        drafts_own: bool, whether own tokens are drafted from. acceptance: [B, ACCEPTANCE_KINDS]
        float32, expected share of right drafts. weights: float32, worth of a row's token. costs:
        [number of widths] float32, seconds of a step, or any multiple.
    """

    text: jax.Array
    ends: jax.Array
    num_text: jax.Array
    drafts_own: jax.Array
    acceptance: jax.Array
    weights: jax.Array
    costs: jax.Array


class Match(NamedTuple):
    """Start of a row's draft in its text.

    Shape: [B] int32, exists bool. place: N if there is none. kind: One of
        `ACCEPTANCE_KINDS`. source: One of `NUM_SOURCES`.
    """

    exists: jax.Array
    place: jax.Array
    kind: jax.Array
    source: jax.Array


class Drafts(NamedTuple):
    """Drafts that the next step verifies.

    Shape: tokens: [B, D] int32. counts: [B] int32, drafts of each row. match: Where they are from.
        width: Scalar int32, index into the widths. is_searched: Scalar bool, whether anybody looked
        for drafts.
    """

    tokens: jax.Array
    counts: jax.Array
    match: Match
    width: jax.Array
    is_searched: jax.Array


def verify_widths(num_rows: int, num_drafts: int, max_tokens: int) -> tuple[int, ...]:
    """Tokens of a step, ascending; the first takes one of each row, others drafts too.

    Args:
        num_rows: Rows of the batch.
        num_drafts: Most drafts of a row.
        max_tokens: Most tokens of a step.
    """
    most = min(num_rows * (1 + num_drafts), max_tokens)
    wider = []
    while most >= 2 * num_rows and most > 1 and len(wider) < 3:
        wider.append(most)
        most //= 2
    return (num_rows, *reversed(wider))


def row_drafts(width: int, num_drafts: int) -> int:
    """Most drafts of one row in a step of that width."""
    return min(width - 1, num_drafts)


def may_pay(
    drafts: DraftBatch, active: jax.Array, widths: tuple[int, ...], num_drafts: int
) -> jax.Array:
    """Whether drafts would pay if all rows had as many as fit, of the best kind of any row."""
    likely = jnp.max(jnp.where(active[:, None], drafts.acceptance, 0.0))
    likely = jnp.minimum(likely, MOST_CERTAIN)
    num_active = jnp.sum(active, dtype=jnp.int32).astype(jnp.float32)
    room = jnp.asarray(widths, jnp.float32) / jnp.maximum(num_active, 1.0) - 1.0
    rate = (1 + expected_right(likely, jnp.minimum(room, num_drafts))) / drafts.costs
    return jnp.any(rate[1:] > 1 / drafts.costs[0])


Search = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, int], jax.Array]
"""The longest match of each row, see `search_text`."""


def search_text(
    text: jax.Array, num_text: jax.Array, stops: jax.Array, ends: jax.Array, max_length: int
) -> jax.Array:
    """The portable `Search`: compares all of a text, chunk by chunk.

    Args:
        text: [B, N] int32, see `DraftBatch`.
        num_text: [B] int32, its end.
        stops: [B] int32, end of the places that count.
        ends: [B, E] int32, ends of parts: of equal matches one in an earlier part counts, in one
            part the last.
        max_length: Longer matches count as this.

    Returns:
        [B] int32: `(length * (E + 2) + E - part) * (N + 1) + place`, where the place is that of the
        token behind the match; 0 if nothing matches.
    """
    num_rows, size = text.shape
    ages = num_text[:, None] - 1 - jnp.arange(max_length, dtype=jnp.int32)[None]
    last = jnp.take_along_axis(text, ages, axis=1, mode="clip")
    last = jnp.where(last >= 0, last, NO_TOKEN - 1)  # matches nothing

    def search(chunk: jax.Array, best: jax.Array) -> jax.Array:
        first = max_length + chunk * TEXT_CHUNK
        shape = (num_rows, max_length + TEXT_CHUNK)
        window = lax.dynamic_slice(text, (jnp.int32(0), first - max_length), shape)
        window = lax.optimization_barrier(window)  # read once
        length = matches = jnp.ones((num_rows, TEXT_CHUNK), jnp.int32)
        length = length - 1
        for age in range(max_length):
            begin = max_length - 1 - age
            is_same = window[:, begin : begin + TEXT_CHUNK] == last[:, age, None]
            matches = matches & is_same.astype(jnp.int32)
            length = length + matches
        place = first + jnp.arange(TEXT_CHUNK, dtype=jnp.int32)[None]
        has_next = (window[:, max_length:] >= 0) & (place < stops[:, None]) & (length > 0)
        num_ends = ends.shape[1]
        level = length * (num_ends + 2) + num_ends - part_of(place, ends)
        return jnp.maximum(best, jnp.where(has_next, level * (size + 1) + place, 0))

    num_chunks = (jnp.max(num_text) - max_length + TEXT_CHUNK - 1) // TEXT_CHUNK
    nothing = jnp.zeros((num_rows, TEXT_CHUNK), jnp.int32)
    return jnp.max(lax.fori_loop(0, num_chunks, search, nothing), axis=1)


def find_drafts(
    drafts: DraftBatch, text: jax.Array, num_text: jax.Array, pointer: jax.Array, search: Search
) -> Match:
    """Finds what follows the longest match of each row's last tokens.

    Of equal matches history comes before siblings, these before own tokens, and later ones before
    earlier ones. Where only the last token matches or none does, the draft may go on behind the
    last one instead: one token may have differed.

    Args:
        drafts: The batch.
        text: [B, N] int32, with the rows' newest tokens.
        num_text: [B] int32, its end.
        pointer: [B] int32, where the last draft would go on; N if there was none.
        search: The backend's.
    """
    size = text.shape[1]
    end = jnp.where(drafts.drafts_own, num_text, drafts.ends[:, 1])
    best = search(text, num_text, end, drafts.ends, MATCHED_TOKENS)
    length = best // (size + 1) // (drafts.ends.shape[1] + 2)
    place = jnp.where(best > 0, best % (size + 1), size)
    kind = jnp.where(length >= LONG_MATCH, 2, 1)
    can_go_on = (pointer < end) & (_take(text, pointer) >= 0)
    is_likelier = (length == 0) | (drafts.acceptance[:, 0] >= drafts.acceptance[:, 1])
    goes_on = can_go_on & (length <= 1) & is_likelier
    place = jnp.where(goes_on, pointer, place)
    kind = jnp.where(goes_on, 0, kind)
    return Match(place < size, place, kind, part_of(place[:, None], drafts.ends)[:, 0])


def part_of(place: jax.Array, ends: jax.Array) -> jax.Array:
    """The part of the text [B, ...] that places [B or 1, ...] are in, by the ends [B, E]."""
    behind = [(place >= ends[:, part, None]).astype(jnp.int32) for part in range(ends.shape[1])]
    return functools.reduce(operator.add, behind)


def _take(text: jax.Array, place: jax.Array) -> jax.Array:
    return jnp.take_along_axis(text, place[:, None], axis=1, mode="fill", fill_value=NO_TOKEN)[:, 0]


def read_drafts(
    text: jax.Array, num_text: jax.Array, match: Match, num_drafts: int, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """The tokens [B, D] from a match on, and how many of them there are [B].

    What repeats goes on: behind the last own token come those behind the match again.
    """
    size = text.shape[1]
    steps = jnp.arange(num_drafts, dtype=jnp.int32)[None]
    period = jnp.where(match.source == NUM_SOURCES - 1, num_text - match.place, size)
    places = match.place[:, None] + steps % jnp.maximum(period, 1)[:, None]
    tokens = jnp.take_along_axis(text, places, axis=1, mode="fill", fill_value=NO_TOKEN)
    return tokens, num_leading((tokens >= 0) & (tokens < vocab_size))


def num_leading(conditions: jax.Array) -> jax.Array:
    """How many conditions [B, ...] of each row hold before the first that does not; [B] int32."""
    return jnp.sum(jnp.cumprod(conditions, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)


def choose_drafts(
    drafts: DraftBatch,
    match: Match,
    tokens: jax.Array,
    available: jax.Array,
    active: jax.Array,
    widths: tuple[int, ...],
) -> Drafts:
    """Chooses the width of a step, and which drafts fill it.

    Args:
        drafts: With the acceptance of now.
        match: Where the drafts are from.
        tokens: [B, D] int32, the drafts.
        available: [B] int32, how many each row could verify.
        active: [B] bool.
        widths: Of `verify_widths`.
    """
    num_rows, num_drafts = tokens.shape
    wanted = jnp.where(active, available, 0)
    likely = jnp.take_along_axis(drafts.acceptance, match.kind[:, None], axis=1)
    likely = jnp.minimum(likely, MOST_CERTAIN)
    number = jnp.arange(1, num_drafts + 1, dtype=jnp.int32)[None]
    # A draft counts if it and all before it are right.
    gain = likely ** number.astype(jnp.float32)
    gain = jnp.where(number <= wanted[:, None], gain, 0.0)
    # Floats that are not negative have the order of their bits, which are sorted faster.
    worth = lax.bitcast_convert_type(drafts.weights[:, None] * gain, jnp.int32)
    ranked, gains = lax.sort((-worth.reshape(-1), gain.reshape(-1)), num_keys=1)
    num_active = jnp.sum(active, dtype=jnp.int32)
    room = jnp.minimum(jnp.asarray(widths, jnp.int32) - num_active, num_rows * num_drafts)
    room = room.at[0].set(0)
    more = jnp.where(room > 0, jnp.cumsum(gains)[room - 1], 0.0)
    rate = (num_active.astype(jnp.float32) + more) / drafts.costs
    width = jnp.argmax(rate).astype(jnp.int32)
    room = room[width]
    least = jnp.where(room > 0, -ranked[room - 1], jnp.iinfo(jnp.int32).max)
    # Drafts of equal worth are of different rows, or worth nothing.
    num_above = jnp.sum(worth > least, dtype=jnp.int32)
    ties = (worth == least) & (worth > 0)
    order = jnp.cumsum(ties.T.reshape(-1), dtype=jnp.int32).reshape(num_drafts, num_rows).T
    taken = (worth > least) | (ties & (order <= room - num_above))
    counts = jnp.sum(taken, axis=1, dtype=jnp.int32)
    return Drafts(tokens, counts, match, width, jnp.array(True))


def learn(
    acceptance: jax.Array,
    drafts: Drafts,
    num_right: jax.Array,
    was_active: jax.Array,
    stopped: jax.Array,
) -> jax.Array:
    """The acceptance [B, ACCEPTANCE_KINDS] after a step, by each row's number of right drafts.

    An exponential average over drafts, in their order; the first wrong one is the last that counts.
    """
    is_kind = jnp.arange(ACCEPTANCE_KINDS, dtype=jnp.int32)[None] == drafts.match.kind[:, None]
    was_tried = (drafts.counts > 0)[:, None] & is_kind
    was_wrong = (num_right < drafts.counts) & ~stopped  # behind the end nothing is wrong
    tried = 1 - (1 - acceptance) * (1 - _LEARNING_RATE) ** num_right[:, None].astype(jnp.float32)
    tried = jnp.where(was_wrong[:, None], tried * (1 - _LEARNING_RATE), tried)
    hoped = acceptance + HOPE_RATE * jnp.maximum(HOPE - acceptance, 0)
    is_found = is_kind & drafts.match.exists[:, None]
    missed = jnp.where(is_found, hoped, acceptance * (1 - _MISS_RATE))
    learnt = jnp.where(was_tried, tried, jnp.where(drafts.is_searched, missed, hoped))

    def of_others(count: jax.Array) -> jax.Array:
        """Sums over the other rows, by kind: [B, ACCEPTANCE_KINDS]."""
        by_kind = jnp.where(was_tried, count[:, None], 0).astype(jnp.float32)
        return jnp.sum(by_kind, axis=0, keepdims=True) - by_kind

    right, wrong = of_others(num_right), of_others(was_wrong)
    share = right / jnp.maximum(right + wrong, 1.0)
    weight = 1 - (1 - _SHARED_RATE) ** (right + wrong)
    return jnp.where(was_active[:, None], learnt + weight * (share - learnt), acceptance)
