"""Draft tokens on the device: found in texts, in each step.

A row has a *text*: reference sequences, and behind them its own tokens, which grow. A draft is what
follows the longest match of the row's last tokens in its text, as in prompt lookup decoding
(Saxena, 2023) and suffix decoding (Oliaro et al., arXiv 2411.04975).

Shape legend: B rows, N entries of a text, C entries of a chunk, q tokens of a row in a step: its
newest one and q - 1 drafts.
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
from sgljax_engine.speculation.texts import MATCHED_TOKENS

TEXT_CHUNK = 512
"""Entries that the search takes at a time."""

NO_TOKEN = -1
"""Entry of a text without a token: between sequences, and at its end."""

NUM_SOURCES = len(DRAFTERS)
"""Parts of a text: history, siblings, own tokens; the places of their drafters in counts."""


class DraftBatch(NamedTuple):
    """Sources of the rows' drafts.

    Shape (all [B] unless said): text: [B, N] int32, `NO_TOKEN` where there is none, as in the first
        `MATCHED_TOKENS` entries; behind those come whole chunks. ends: [B, 2] int32, where history
        and siblings end; own tokens begin at the second. num_text: int32, end of the own tokens.
        drafts_own: bool, whether own tokens are drafted from. places: [q] int32, from 0 on.
    """

    text: jax.Array
    ends: jax.Array
    num_text: jax.Array
    drafts_own: jax.Array
    places: jax.Array


class Drafts(NamedTuple):
    """Drafts that the next step verifies.

    Shape: tokens: [B, q - 1] int32. counts: [B] int32, drafts of each row. place: [B] int32, of the
        first in the row's text; N if there is none. source: [B] int32, one of `NUM_SOURCES`.
    """

    tokens: jax.Array
    counts: jax.Array
    place: jax.Array
    source: jax.Array


Search = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, int], jax.Array]
"""The longest match of each row, see `search_text`."""


def search_text(
    text: jax.Array, num_text: jax.Array, stops: jax.Array, ends: jax.Array, max_length: int
) -> jax.Array:
    """The portable `Search`: compares all of a text [B, N], see `DraftBatch`, chunk by chunk.

    Returns [B] int32 `(length * (E + 2) + E - part) * (N + 1) + place`, where the place is that of
    the token behind the match; 0 if nothing matches. Longer matches than `max_length` count as
    this. Only places before `stops` [B] count. `ends` [B, E] are those of parts: of equal matches
    one in an earlier part counts, in one part the last.
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
    batch: DraftBatch,
    text: jax.Array,
    num_text: jax.Array,
    pointer: jax.Array,
    search: Search,
    vocab_size: int,
) -> Drafts:
    """Drafts what follows the longest match of each row's last tokens.

    Of equal matches history comes before siblings, these before own tokens, and later ones before
    earlier ones. Where only the last token matches or none does, the draft may go on behind the
    last one instead: one token may have differed. What repeats goes on: behind the last own token
    come those behind the match again.
    """
    size = text.shape[1]
    end = jnp.where(batch.drafts_own, num_text, batch.ends[:, 1])
    best = search(text, num_text, end, batch.ends, MATCHED_TOKENS)
    length = best // (size + 1) // (batch.ends.shape[1] + 2)
    place = jnp.where(best > 0, best % (size + 1), size)
    goes_on = (length <= 1) & (pointer < end) & (_gather(text, pointer) >= 0)
    place = jnp.where(goes_on, pointer, place)
    source = part_of(place[:, None], batch.ends)[:, 0]
    steps = batch.places[None, :-1]
    period = jnp.where(source == NUM_SOURCES - 1, num_text - place, size)
    places = place[:, None] + steps % jnp.maximum(period, 1)[:, None]
    tokens = jnp.take_along_axis(text, places, axis=1, mode="fill", fill_value=NO_TOKEN)
    counts = num_leading((tokens >= 0) & (tokens < vocab_size))
    return Drafts(tokens, jnp.where(place < size, counts, 0), place, source)


def part_of(place: jax.Array, ends: jax.Array) -> jax.Array:
    """The part of the text [B, ...] that places [B or 1, ...] are in, by the ends [B, E]."""
    behind = [(place >= ends[:, part, None]).astype(jnp.int32) for part in range(ends.shape[1])]
    return functools.reduce(operator.add, behind)


def _gather(text: jax.Array, place: jax.Array) -> jax.Array:
    return jnp.take_along_axis(text, place[:, None], axis=1, mode="fill", fill_value=NO_TOKEN)[:, 0]


def num_leading(conditions: jax.Array) -> jax.Array:
    """How many conditions [B, ...] of each row hold before the first that does not; [B] int32."""
    return jnp.sum(jnp.cumprod(conditions, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
