"""Drafts on the device: searched in texts, and shared out among rows."""

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
    Match,
    choose_drafts,
    find_drafts,
    learn,
    may_pay,
    read_drafts,
    search_text,
    verify_widths,
)
from sgljax_engine.speculation.plan import RowDrafts
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


def batch(*rows: RowDrafts, costs: tuple[float, ...] = (1.0,) * 4) -> DraftBatch:
    made = build_draft_batch(rows, NUM_ROWS, TextSizes.of(200, grown=64), costs)
    return jax.tree.map(jnp.asarray, made)


def are_used(rows: DraftBatch) -> np.ndarray:
    """Which rows of a batch were given, [NUM_ROWS] bool."""
    return np.asarray(rows.num_text) > 0


def row(
    own: list[int],
    history: tuple[list[int], ...] = (),
    siblings: tuple[list[int], ...] = (),
    drafts_own: bool = True,
    acceptance: tuple[float, ...] = (0.5, 0.5, 0.5),
    weight: float = 1.0,
) -> RowDrafts:
    def arrays(lists: tuple[list[int], ...]) -> list[np.ndarray]:
        return [np.asarray(each, np.int32) for each in lists]

    tokens = np.asarray(own, np.int32)
    return RowDrafts(arrays(history), arrays(siblings), tokens, drafts_own, acceptance, weight)


@jax.jit
def find(rows: DraftBatch, pointers: jax.Array) -> tuple[Match, jax.Array, jax.Array]:
    match = find_drafts(rows, rows.text, rows.num_text, pointers, search_text)
    return match, *read_drafts(rows.text, rows.num_text, match, NUM_DRAFTS, vocab_size=100)


def drafted(rows: DraftBatch, pointer: int | None = None) -> tuple[list[list[int]], Match]:
    """The drafts of each row, and where they are from."""
    size = rows.text.shape[1]
    pointers = jnp.full(NUM_ROWS, size if pointer is None else pointer, jnp.int32)
    used = are_used(rows)
    match, tokens, counts = jax.tree.map(lambda x: np.asarray(x)[used], find(rows, pointers))
    return [t[:n] for t, n in zip(tokens.tolist(), counts.tolist(), strict=True)], match


class TestFind:
    def test_what_follows_the_longest_match(self):
        rows = batch(row([1, 2, 3], history=([2, 3, 4, 5], [1, 2, 3, 6, 7], [9, 3, 8])))
        drafts, match = drafted(rows)
        assert drafts == [[6, 7]]
        assert match.source.tolist() == [0]
        assert match.kind.tolist() == [1]

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

    def test_a_long_match_is_of_another_kind(self):
        rows = batch(row([1, 2, 3, 4], history=([1, 2, 3, 4, 5],)), row([4], history=([4, 5],)))
        assert drafted(rows)[1].kind.tolist() == [2, 1]

    def test_what_repeats_goes_on(self):
        rows = batch(row([9, 1, 2, 3, 1, 2, 3]), row([4, 4]))
        assert drafted(rows)[0] == [[1, 2, 3, 1, 2, 3, 1], [4] * NUM_DRAFTS]

    def test_own_tokens_may_be_left_out(self):
        drafts, match = drafted(batch(row([1, 2, 1], drafts_own=False)))
        assert drafts == [[]]
        assert not match.exists.any()

    def test_sequences_do_not_run_into_each_other(self):
        rows = batch(row([7, 1], history=([3, 1], [2, 5]), siblings=([6, 1],)))
        assert drafted(rows)[0] == [[]]

    def test_tokens_of_another_vocabulary_end_a_draft(self):
        assert drafted(batch(row([1], history=([1, 2, 100, 3],))))[0] == [[2]]

    def test_goes_on_behind_one_wrong_token(self):
        """It was 9 and not 3."""
        rows = batch(row([1, 2, 9], history=([1, 2, 3, 4, 5],)))
        assert drafted(rows)[0] == [[]]
        drafts, match = drafted(rows, pointer=MATCHED_TOKENS + 3)
        assert drafts == [[4, 5]]
        assert match.kind.tolist() == [0]

    def test_a_better_match_counts_more_than_going_on(self):
        rows = batch(row([1, 2, 9], history=([1, 2, 3, 4, 5], [2, 9, 8])))
        assert drafted(rows, pointer=MATCHED_TOKENS + 3)[0] == [[8]]


choose = jax.jit(choose_drafts)


def chosen(rows: DraftBatch, widths: tuple[int, ...], available: list[int] | int = NUM_DRAFTS):
    """Width and number of drafts of each row, all of the longest matches."""
    active = are_used(rows)
    numbers = np.zeros(NUM_ROWS, np.int32)
    match = Match(numbers == 0, numbers, numbers + 2, numbers)  # type: ignore[arg-type]
    tokens, has = np.zeros((NUM_ROWS, NUM_DRAFTS), np.int32), numbers.copy()
    has[active] = available
    drafts = choose(rows, match, tokens, has, active, np.asarray(widths, np.int32))
    counts = np.asarray(drafts.counts)[active].tolist()
    assert sum(counts) + sum(active) <= widths[drafts.width]
    return int(drafts.width), counts


class TestChoose:
    def test_the_width_with_the_most_tokens_a_second(self):
        sure, unsure = (0.0, 0.0, 0.95), (0.0, 0.0, 0.1)
        for acceptance, costs, width in (
            (sure, (1.0, 1.1, 1.3, 1.6), 3),
            (sure, (1.0, 1.1, 1.3, 9.0), 2),
            (unsure, (1.0, 1.05, 1.3, 1.6), 1),
            (unsure, (1.0, 1.2, 1.3, 1.6), 0),
        ):
            rows = batch(row([1], acceptance=acceptance), costs=costs)
            assert chosen(rows, (1, 2, 4, 8))[0] == width

    def test_likelier_rows_get_more(self):
        rows = [row([1], acceptance=(0, 0, share)) for share in (0.9, 0.7, 0.0)]
        width, counts = chosen(batch(*rows, costs=(1.0, 1.0)), (3, 8))
        assert (width, counts) == (1, [4, 1, 0])

    def test_rows_of_more_weight_get_more(self):
        rows = [row([1], weight=weight) for weight in (1.0, 2.0)]
        assert chosen(batch(*rows, costs=(1.0, 1.0)), (2, 7))[1] == [2, 3]

    def test_no_more_than_there_are(self):
        rows = batch(row([1]), row([1]), costs=(1.0, 1.0))
        assert chosen(rows, (2, 16), [3, 2])[1] == [3, 2]

    def test_equal_rows_fill_the_width(self):
        rows = batch(*[row([1]) for _ in range(3)], costs=(1.0, 1.0))
        assert chosen(rows, (3, 8))[1] == [2, 2, 1]

    def test_widths(self):
        assert verify_widths(1, 15, 64) == (1, 4, 8, 16)
        assert verify_widths(8, 15, 64) == (8, 16, 32, 64)
        assert verify_widths(8, 2, 64) == (8, 24)
        assert verify_widths(32, 15, 64) == (32, 64)
        assert verify_widths(33, 15, 64) == (33,)

    @pytest.mark.parametrize(("acceptance", "pays"), [(0.9, True), (0.1, False)])
    def test_may_pay(self, acceptance, pays):
        rows = batch(row([1], acceptance=(0.0, acceptance, 0.0)), costs=(1.0, 1.5))
        found = jax.jit(may_pay, static_argnums=(2, 3))(rows, are_used(rows), (1, 8), NUM_DRAFTS)
        assert bool(found) == pays


learn_step = jax.jit(learn)


class TestLearn:
    def after(
        self, num_right: int, counts: int, steps: int = 1, exists: bool = True
    ) -> list[float]:
        numbers = jnp.zeros(NUM_ROWS, jnp.int32)
        match = Match(numbers == 0 if exists else numbers > 0, numbers, numbers + 2, numbers)
        rows = batch(row([1], acceptance=(0.4, 0.4, 0.4)), costs=(1.0, 1.0))
        tokens, active = jnp.zeros((NUM_ROWS, NUM_DRAFTS), jnp.int32), jnp.asarray(are_used(rows))
        widths = jnp.asarray([1, 8], jnp.int32)
        drafts = choose(rows, match, tokens, numbers + counts, active, widths)
        acceptance, right, stopped = rows.acceptance, numbers + num_right, numbers > 0
        for _ in range(steps):
            acceptance = learn_step(acceptance, drafts, right, active, stopped)
        return acceptance[0].tolist()

    def test_right_drafts_raise_their_kind(self):
        found = self.after(num_right=3, counts=3)
        assert found[2] == pytest.approx(1 - 0.6 * 0.75**3)
        assert max(found[:2]) < 0.4, "kinds that were searched for in vain"

    def test_the_first_wrong_one_is_the_last_that_counts(self):
        assert self.after(num_right=1, counts=5)[2] == pytest.approx((1 - 0.6 * 0.75) * 0.75)

    def test_searches_in_vain_lower_all(self):
        assert max(self.after(num_right=0, counts=0, steps=64, exists=False)) < 0.1

    def test_what_is_not_tried_becomes_worth_a_try(self):
        found = self.after(num_right=0, counts=0, steps=2000)
        assert found[2] > 0.6
        assert found[0] < 0.1


def test_references_that_do_not_fit_are_cut():
    """The newest ones are taken first; siblings and history share the room."""
    sizes = TextSizes(references=20, own=4, grown=8)
    many = tuple([10 * i + j for j in range(6)] for i in range(5))
    made = build_draft_batch([row([1, 2, 3, 4, 5, 6], many, many)], 2, sizes, (1.0,))
    tokens = np.asarray(made.text)[0].tolist()
    assert len(tokens) == sizes.total
    assert tokens[:MATCHED_TOKENS] == [NO_TOKEN] * MATCHED_TOKENS
    first, second = np.asarray(made.ends)[0].tolist()
    siblings = tokens[first:second]
    assert siblings == [30, 31, NO_TOKEN, 40, 41, 42, 43, 44, 45, NO_TOKEN]
    assert tokens[MATCHED_TOKENS:first] == siblings
    assert tokens[second : int(made.num_text[0])] == [3, 4, 5, 6]
    assert int(made.num_text[1]) == 0
