"""Drafts on the device: searched in texts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sgljax_cpu
from sgljax_cpu.longest_match import longest_match
from sgljax_engine.runner.batches.drafts import TextSizes, build_draft_batch
from sgljax_engine.runner.programs.drafts import (
    NO_TOKEN,
    TEXT_CHUNK,
    DraftBatch,
    Drafts,
    find_drafts,
    search_text,
)
from sgljax_engine.speculation.plan import RowDrafts, row_tokens
from sgljax_engine.speculation.texts import MATCHED_TOKENS

NUM_DRAFTS = 7
NUM_ROWS = 4
"""All batches have it, so that there are few programs; those behind the given ones are unused."""


@pytest.fixture(autouse=True)
def strict_ranks():
    """As a host process may be set."""
    before = jax.config.jax_numpy_rank_promotion  # type: ignore[attr-defined]
    jax.config.update("jax_numpy_rank_promotion", "raise")
    yield
    jax.config.update("jax_numpy_rank_promotion", before)


def search_slowly(text, num_text, stops, ends, max_length):
    """As `search_text`, written down plainly."""
    size, num_ends = text.shape[1], ends.shape[1]
    found = np.zeros(len(text), np.int64)
    for row, tokens in enumerate(text.tolist()):
        last = tokens[: num_text[row]]
        for index in range(max_length, stops[row]):
            length = 0
            while (
                length < max_length
                and last[-1 - length] >= 0
                and tokens[index - 1 - length] == last[-1 - length]
            ):
                length += 1
            if length and tokens[index] >= 0:
                level = length * (num_ends + 2) + num_ends - sum(ends[row] <= index)
                found[row] = max(found[row], level * (size + 1) + index)
    return found


@pytest.mark.parametrize("backend", ["portable", "native"])
def test_search(backend):
    if backend == "native" and sgljax_cpu.unavailable() is not None:
        pytest.skip(f"no JIT-compiled CPU kernels here: {sgljax_cpu.unavailable()}")
    search = jax.jit(longest_match if backend == "native" else search_text, static_argnums=4)
    rng, size = np.random.default_rng(0), MATCHED_TOKENS + 2 * TEXT_CHUNK
    for vocab_size in (1, 2, 3, 10, 500):
        text = rng.integers(NO_TOKEN, vocab_size, (6, size), dtype=np.int32)
        text[:, :MATCHED_TOKENS] = NO_TOKEN
        num_text = rng.integers(MATCHED_TOKENS + 1, size + 1, 6, dtype=np.int32)
        text[np.arange(6), num_text - 1] = rng.integers(0, vocab_size, 6)
        ends = np.sort(rng.integers(MATCHED_TOKENS, size, (6, 2), dtype=np.int32), axis=1)
        stops = np.where(rng.random(6) < 0.5, num_text, np.minimum(ends[:, 1], num_text))
        stops[0] = num_text[0] = 0  # a row without a text
        found = search(text, num_text, stops.astype(np.int32), ends, MATCHED_TOKENS)
        expected = search_slowly(text[1:], num_text[1:], stops[1:], ends[1:], MATCHED_TOKENS)
        np.testing.assert_array_equal(found, [0, *expected])


def batch(*rows: RowDrafts) -> DraftBatch:
    made = build_draft_batch(rows, NUM_ROWS, TextSizes.of(200, grown=64), 1 + NUM_DRAFTS)
    return jax.tree.map(jnp.asarray, made)


def are_used(rows: DraftBatch) -> np.ndarray:
    """Which rows of a batch were given, [NUM_ROWS] bool."""
    return np.asarray(rows.num_text) > 0


def row(
    own: list[int],
    history: tuple[list[int], ...] = (),
    siblings: tuple[list[int], ...] = (),
    drafts_own: bool = True,
) -> RowDrafts:
    def arrays(lists: tuple[list[int], ...]) -> list[np.ndarray]:
        return [np.asarray(each, np.int32) for each in lists]

    tokens = np.asarray(own, np.int32)
    return RowDrafts(arrays(history), arrays(siblings), tokens, drafts_own)


@jax.jit
def find(rows: DraftBatch, pointers: jax.Array) -> Drafts:
    return find_drafts(rows, rows.text, rows.num_text, pointers, search_text, vocab_size=100)


def drafted(rows: DraftBatch, pointer: int | None = None) -> tuple[list[list[int]], Drafts]:
    """The drafts of each row, and where they are from."""
    size = rows.text.shape[1]
    pointers = jnp.full(NUM_ROWS, size if pointer is None else pointer, jnp.int32)
    used = are_used(rows)
    found = jax.tree.map(lambda x: np.asarray(x)[used], find(rows, pointers))
    pairs = zip(found.tokens.tolist(), found.counts.tolist(), strict=True)
    return [tokens[:count] for tokens, count in pairs], found


class TestFind:
    def test_what_follows_the_longest_match(self):
        rows = batch(row([1, 2, 3], history=([2, 3, 4, 5], [1, 2, 3, 6, 7], [9, 3, 8])))
        drafts, match = drafted(rows)
        assert drafts == [[6, 7]]
        assert match.source.tolist() == [0]

    def test_of_equal_matches_the_newest_history_counts(self):
        own = [5, 1, 2, 7, 1, 2]
        rows = [
            row(own, history=([1, 2, 3], [1, 2, 4]), siblings=([1, 2, 6],)),
            row(own, siblings=([1, 2, 5], [1, 2, 6])),
            row(own),
        ]
        drafts, match = drafted(batch(*rows))
        assert [each[0] for each in drafts] == [4, 6, 7]
        assert match.source.tolist() == [0, 1, 2]

    def test_what_repeats_goes_on(self):
        rows = batch(row([9, 1, 2, 3, 1, 2, 3]), row([4, 4]))
        assert drafted(rows)[0] == [[1, 2, 3, 1, 2, 3, 1], [4] * NUM_DRAFTS]

    def test_own_tokens_may_be_left_out(self):
        assert drafted(batch(row([1, 2, 1], drafts_own=False)))[0] == [[]]

    def test_sequences_do_not_run_into_each_other(self):
        rows = batch(row([7, 1], history=([3, 1], [2, 5]), siblings=([6, 1],)))
        assert drafted(rows)[0] == [[]]

    def test_tokens_of_another_vocabulary_end_a_draft(self):
        assert drafted(batch(row([1], history=([1, 2, 100, 3],))))[0] == [[2]]

    def test_goes_on_behind_one_wrong_token(self):
        """It was 9 and not 3."""
        rows = batch(row([1, 2, 9], history=([1, 2, 3, 4, 5],)))
        assert drafted(rows)[0] == [[]]
        assert drafted(rows, pointer=MATCHED_TOKENS + 3)[0] == [[4, 5]]

    def test_a_better_match_counts_more_than_going_on(self):
        rows = batch(row([1, 2, 9], history=([1, 2, 3, 4, 5], [2, 9, 8])))
        assert drafted(rows, pointer=MATCHED_TOKENS + 3)[0] == [[8]]


@pytest.mark.parametrize(
    ("num_rows", "num_drafts", "sizes"),
    [
        (1, 15, (1, 4, 16)),
        (8, 15, (1, 2, 8)),
        (8, 2, (1, 3)),
        (32, 15, (1, 2)),
        (33, 15, (1,)),
    ],
)
def test_tokens_of_a_row_in_a_step(num_rows, num_drafts, sizes):
    assert row_tokens(num_rows, num_drafts, max_tokens=64) == sizes


def test_references_that_do_not_fit_are_cut():
    """The newest ones are taken first; siblings and history share the room."""
    sizes = TextSizes(references=20, own=4, grown=8)
    many = tuple([10 * i + j for j in range(6)] for i in range(5))
    made = build_draft_batch([row([1, 2, 3, 4, 5, 6], many, many)], 2, sizes, 4)
    tokens = np.asarray(made.text)[0].tolist()
    assert len(tokens) == sizes.total
    assert tokens[:MATCHED_TOKENS] == [NO_TOKEN] * MATCHED_TOKENS
    first, second = np.asarray(made.ends)[0].tolist()
    siblings = tokens[first:second]
    assert siblings == [30, 31, NO_TOKEN, 40, 41, 42, 43, 44, 45, NO_TOKEN]
    assert tokens[MATCHED_TOKENS:first] == siblings
    assert tokens[second : int(made.num_text[0])] == [3, 4, 5, 6]
    assert int(made.num_text[1]) == 0
