"""Scoring given tokens: packing, sharing, and agreement with what decoding reports."""

from __future__ import annotations

import numpy as np
import pytest

from sgljax_engine import Engine, InvalidRequestError, SamplingParams
from sgljax_engine.runner.batches.packing import pack_scores
from tests.engine.exactness_checks import check_scaled_logprobs
from tests.engine.interrupts import make_engine
from tests.engine.models import (
    GPT_OSS,
    LATENTS,
    MIXED_HEADS,
    NEW_FAMILIES,
    SHARED_KEYS,
    TINY,
    random_prompts,
    spread_weights,
)
from tests.engine.native_cases import needs_machine_code
from tests.geometry import CHUNKED, SMALL

BLOCK = 4


def pack(sequences, starts=None, *, buckets=(8, 32, 64), max_tokens=32):
    starts = [1] * len(sequences) if starts is None else starts
    return list(
        pack_scores(
            sequences, starts, buckets=buckets, max_tokens=max_tokens, block=BLOCK, table_width=16
        )
    )


def context_of(batch, token):
    """The tokens that the token at an index of the batch can see, itself included, by its pages."""
    block, offset = divmod(int(token), BLOCK)
    end = int(batch.positions[token]) + 1
    ids = batch.input_ids.reshape(-1, BLOCK)[batch.page_table[block]].reshape(-1)[:end]
    assert end <= batch.seq_lens[block]
    assert offset == (end - 1) % BLOCK
    return ids.tolist()


class TestPacking:
    @pytest.mark.parametrize("seed", range(2))
    def test_each_scored_token_sees_what_comes_before_it(self, seed):
        rng = np.random.default_rng(seed)
        # Few different tokens, so that beginnings are shared in every way.
        sequences = [rng.integers(0, 2, rng.integers(1, 30)).tolist() for _ in range(40)]
        starts = [int(rng.integers(1, len(ids) + 1)) for ids in sequences]
        packed = pack(sequences, starts)
        assert sum(len(each.slots) for each in packed) == len(sequences)
        every = [(each.batch, slots) for each in packed for slots in each.slots]
        for ids, start, (batch, slots) in zip(sequences, starts, every, strict=True):
            assert len(slots) == len(ids) - start
            assert all(slots < batch.num_scored)
            for at, slot in zip(range(start, len(ids)), slots, strict=True):
                assert batch.targets[slot] == ids[at]
                assert context_of(batch, batch.places[slot]) == ids[:at]

    def test_a_group_shares_the_whole_blocks_of_its_prompt(self):
        prompt = [5] * 10  # two blocks and a half
        group = [[*prompt, token, token] for token in range(6)]
        (packed,) = pack(group, [10] * 6)
        assert np.count_nonzero(packed.batch.seq_lens) == 2 + 6
        # The first completion token of each follows its own copy of the prompt's last ones.
        assert packed.batch.num_scored == 12

    def test_equal_sequences_are_scored_once(self):
        (packed,) = pack([[1, 2, 3, 4, 5]] * 7)
        assert np.count_nonzero(packed.batch.seq_lens) == 2
        assert packed.batch.num_scored == 4
        assert all(slots.tolist() == packed.slots[0].tolist() for slots in packed.slots)

    def test_batches_are_cut_where_tokens_run_out(self):
        packed = pack([[i] * 12 for i in range(5)])  # three blocks each, eight to a batch
        assert [len(each.slots) for each in packed] == [2, 2, 1]
        assert [len(each.batch.input_ids) for each in packed] == [32, 32, 32]


@pytest.fixture(scope="module")
def engine():
    with make_engine() as engine:
        yield engine


class TestScore:
    def test_matches_what_decoding_reported(self, engine):
        check_scaled_logprobs(engine, 0.7)

    def test_starts_leave_the_rest_as_it_is(self, engine):
        sequences = random_prompts(8, 2, 60)
        every = engine.score(sequences)
        starts = [1 + len(ids) // 2 for ids in sequences]
        for ids, start, whole, part in zip(
            sequences, starts, every, engine.score(sequences, start_lens=starts), strict=True
        ):
            assert whole.shape == (len(ids) - 1,)
            np.testing.assert_allclose(part, whole[start - 1 :], atol=5e-5)

    def test_sequences_of_a_generator(self, engine):
        sequences = random_prompts(3, 2, 9)
        for got, want in zip(
            engine.score(ids for ids in sequences), engine.score(sequences), strict=True
        ):
            np.testing.assert_array_equal(got, want)

    def test_the_longest_sequence(self, engine):
        ids = random_prompts(1, TINY.context_length, TINY.context_length)[0][:256]
        assert engine.score([ids])[0].shape == (len(ids) - 1,)

    @pytest.mark.parametrize(
        ("starts", "message"),
        [
            ([1], "one entry for each of the 2 sequences, got 1"),
            ([0, 1], r"from 1 to the length of their sequence \(3\), got 0"),
            ([1, 3], r"from 1 to the length of their sequence \(2\), got 3"),
            ([1, 1.5], "got 1.5"),
            ([True, 1], "got True"),
        ],
    )
    def test_refused_starts(self, engine, starts, message):
        with pytest.raises(InvalidRequestError, match=f"start_lens must .*{message}"):
            engine.score([[1, 2, 3], [1, 2]], start_lens=starts)


@needs_machine_code
class TestSameBits:
    """On the JIT-compiled kernels scoring, decoding and every way to pack have the same bits."""

    @pytest.mark.parametrize(
        ("model", "dtype"),
        [
            (TINY, "float32"),
            pytest.param(TINY, "bfloat16", marks=pytest.mark.slow),
            pytest.param(MIXED_HEADS, "bfloat16", marks=pytest.mark.soak),
            pytest.param(SHARED_KEYS, "bfloat16", marks=pytest.mark.soak),
            pytest.param(GPT_OSS, "float32", marks=pytest.mark.soak),
            *(pytest.param(x, "float32", marks=pytest.mark.soak) for x in NEW_FAMILIES.values()),
            pytest.param(LATENTS, "bfloat16", marks=pytest.mark.soak),
        ],
        ids=[
            *("float32", "bfloat16", "mixed heads", "shared keys", "sinks"),
            *NEW_FAMILIES,
            "latents",
        ],
    )
    def test_as_decoding(self, model, dtype):
        prompts = [ids for ids in random_prompts(8, 1, 90) for _ in range(4)]
        params = [
            SamplingParams(max_new_tokens=30, temperature=t, seed=i, ignore_eos=True)
            for i, t in enumerate([0.0, 0.7, 1.0, 1.3] * 8)
        ]
        weights = spread_weights(model)
        with Engine(model_config=model, weights=weights, dtype=dtype, **SMALL) as engine:
            outputs = engine.generate_requests(prompts, params)
            sequences = [[*p, *o.output_ids] for p, o in zip(prompts, outputs, strict=True)]
            for which, temperature in enumerate([1.0, 0.7, 1.0, 1.3]):
                part = slice(which, None, 4)
                starts = [len(prompt) for prompt in prompts[part]]
                scored = engine.score(sequences[part], temperature, starts)
                for output, logprobs in zip(outputs[part], scored, strict=True):
                    expected = np.asarray(output.scaled_logprobs, np.float32)
                    np.testing.assert_array_equal(logprobs, expected)

    def test_in_any_company(self, engine):
        sequences = random_prompts(20, 1, 90)
        together = engine.score(sequences)
        for order in (range(20), range(19, -1, -1)):
            for index in order:
                (alone,) = engine.score([sequences[index]])
                np.testing.assert_array_equal(alone, together[index])
        with make_engine(**CHUNKED) as other:
            for ours, theirs in zip(other.score(sequences), together, strict=True):
                np.testing.assert_array_equal(ours, theirs)
