"""The sampling table's numbers against float64: adjusted logits, sampled frequencies."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from sgljax_engine import SamplingParams
from sgljax_engine.runner.batches.sampling import build_sampling_batch, build_table, table_buckets
from sgljax_engine.sampling import random_bits
from sgljax_engine.sampling.sampler import sample
from sgljax_engine.sampling.table import adjust_logits, record
from sgljax_engine.types import LogitEdits, Request
from tests.engine.sampler_cases import SAMPLERS, patched
from tests.engine.sampling_reference import adjust, distribution, log_softmax
from tests.tiers import tiered

VOCAB = 97
STOP_IDS = (11, 30)
PROMPT = (5, 6, 6, 7, 11)
OUTPUT = (6, 8, 9, 9, 9, 40)
ALL_OPTIONS = SamplingParams(
    temperature=0.8,
    top_k=30,
    top_p=0.95,
    min_p=0.01,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    repetition_penalty=1.3,
    logit_bias={3: 1.5, 9: 2.0, 50: -1.0, 60: -100.0},
    bad_token_ids=(13, 14, 3),
    min_new_tokens=10,
)


def request(params: SamplingParams, prompt=PROMPT, output=OUTPUT, seed=0) -> Request:
    """As the request factory makes it, but for the vocabulary checks."""
    edits = dict.fromkeys(params.allowed_token_ids or (), 0.0)
    for token, bias in (params.logit_bias or {}).items():
        if params.allowed_token_ids is None or token in edits:
            edits[token] = bias
    edits |= dict.fromkeys(params.bad_token_ids, -np.inf)
    table = LogitEdits(
        np.array(list(edits), np.int32),
        np.array(list(edits.values()), np.float32),
        params.allowed_token_ids is not None,
    )
    made = Request(rid="r", prompt_ids=list(prompt), params=params, seed=seed, stop_ids=STOP_IDS)
    made.output_ids.extend(output)
    made.edits = table if edits else None
    return made


def device_adjusted(logits, requests, num_steps=1):
    size, vocab = logits.shape
    rows = build_sampling_batch(requests, size)
    table = build_table(requests, size, vocab, num_steps)
    assert table is not None
    return jax.jit(adjust_logits)(logits, table, rows.stop_ids, rows.step), table, rows


def some_logits(size, vocab, seed=0, scale=3.0):
    return np.random.default_rng(seed).normal(0, scale, (size, vocab)).astype(np.float32)


OPTIONS = {
    "presence": {"presence_penalty": 1.1},
    "presence_negative": {"presence_penalty": -2.0},
    "frequency": {"frequency_penalty": 0.7},
    "frequency_negative": {"frequency_penalty": -0.3},
    "repetition": {"repetition_penalty": 1.7},
    "repetition_below_one": {"repetition_penalty": 0.5},
    "repetition_least": {"repetition_penalty": 0.01},
    "logit_bias": {"logit_bias": {0: 5.0, 9: -100.0, VOCAB - 1: 100.0}},
    "allowed": {"allowed_token_ids": (1, 9, 11, VOCAB - 1)},
    "allowed_one": {"allowed_token_ids": (VOCAB - 1,)},
    "bad": {"bad_token_ids": (0, 9, VOCAB - 1)},
    "min_new_tokens": {"min_new_tokens": len(OUTPUT) + 1},
    "min_new_tokens_reached": {"min_new_tokens": len(OUTPUT), "logit_bias": {0: 1.0}},
    "bias_of_allowed_and_others": {
        "allowed_token_ids": (1, 9),
        "logit_bias": {9: 4.0, 10: 50.0},
    },
    "bias_of_a_bad_token": {"bad_token_ids": (9,), "logit_bias": {9: 100.0}},
    "allowed_with_stops_masked": {"allowed_token_ids": (11, 30, 9), "min_new_tokens": 64},
    "all": dataclasses.asdict(ALL_OPTIONS),
}


class TestAdjustedLogits:
    def test_rows_do_not_touch_one_another(self):
        """All options in one batch, padded with rows that have none."""
        params = [SamplingParams(**fields) for fields in OPTIONS.values()]
        outputs = [OUTPUT[: i % 7] for i in range(len(params))]
        prompts = [PROMPT[: 1 + i % 5] for i in range(len(params))]
        rows = [request(*args) for args in zip(params, prompts, outputs, strict=True)]
        logits = some_logits(32, VOCAB, seed=1)
        got = np.asarray(device_adjusted(logits, rows)[0])
        for row, each in enumerate(rows):
            expected = adjust(logits[row], each.params, each.prompt_ids, each.output_ids, STOP_IDS)
            np.testing.assert_allclose(got[row], expected, rtol=1e-6, atol=1e-5)
        np.testing.assert_array_equal(got[len(rows) :], logits[len(rows) :])


class TestRecord:
    def test_many_steps_match_a_table_built_anew(self):
        """Counts that the device keeps over a dispatch are those that the host would make."""
        rng = np.random.default_rng(3)
        params = [ALL_OPTIONS, SamplingParams(frequency_penalty=0.2), SamplingParams(top_k=3)]
        rows = [
            request(p, PROMPT[:n], OUTPUT[:m])
            for p, n, m in zip(params, (5, 1, 2), (6, 0, 3), strict=True)
        ]
        num_steps = 60
        table = build_table(rows, 4, VOCAB, num_steps)
        assert table is not None
        step = jax.jit(record)
        for i in range(num_steps):
            tokens = rng.integers(0, VOCAB, 4).astype(np.int32)
            active = np.array([True, i % 3 > 0, i < 20, False])
            table = step(table, tokens, active)
            for row, each in enumerate(rows):
                if active[row]:
                    each.output_ids.append(int(tokens[row]))
        logits = some_logits(4, VOCAB, seed=2)
        sampling = build_sampling_batch(rows, 4)
        got = jax.jit(adjust_logits)(logits, table, sampling.stop_ids, sampling.step)
        for row, each in enumerate(rows):
            expected = adjust(logits[row], each.params, each.prompt_ids, each.output_ids, STOP_IDS)
            np.testing.assert_allclose(got[row], expected, rtol=1e-6, atol=1e-5)
        assert int(table.num_seen[0]) == len({*rows[0].prompt_ids, *rows[0].output_ids})
        np.testing.assert_array_equal(got[3], logits[3])

    @pytest.mark.parametrize("num_distinct", [63, 64, 256])
    def test_list_width_grows_with_the_tokens(self, num_distinct):
        vocab = 1000
        assert table_buckets(vocab) == (64, 256, 1000)
        params = SamplingParams(repetition_penalty=1.5, presence_penalty=0.5)
        output = range(100, 100 + num_distinct - 1)
        each = request(params, prompt=(1,), output=output)
        logits = some_logits(1, vocab)
        got, table, _ = device_adjusted(logits, [each], num_steps=1)
        assert table.seen_ids.shape[1] == next(w for w in (64, 256, 1000) if w > num_distinct)
        expected = adjust(logits[0], params, (1,), output)
        np.testing.assert_allclose(got[0], expected, rtol=1e-6, atol=1e-5)

    def test_a_vocabulary_seen_whole_has_no_room_and_needs_none(self):
        params = SamplingParams(frequency_penalty=0.5)
        each = request(params, prompt=range(50), output=range(50, VOCAB))
        table = build_table([each], 1, VOCAB, 16)
        assert table is not None
        assert table.seen_ids.shape[1] == VOCAB
        table = jax.jit(record)(table, np.array([60], np.int32), np.array([True]))
        assert int(table.seen_counts[0, 60]) == 2
        assert int(table.num_seen[0]) == VOCAB

    def test_long_bias_lists(self):
        vocab = 1000
        bias = {token: 0.01 * token for token in range(0, 900, 2)}
        params = SamplingParams(logit_bias=bias, bad_token_ids=tuple(range(1, 300, 2)))
        logits = some_logits(2, vocab)
        got, table, _ = device_adjusted(logits, [request(params)] * 2)
        assert table.edit_ids.shape[1] == vocab
        np.testing.assert_allclose(
            got[1], adjust(logits[1], params, PROMPT, OUTPUT), rtol=1e-6, atol=1e-5
        )


DRAWS = 40_000
FREQUENCY_OPTIONS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, {"temperature": 1.05}),
    ({"temperature": 0.7}, {"temperature": 0.73}),
    ({"temperature": 2.0}, {"temperature": 1.8}),
    ({"top_k": 9}, {"top_k": 10}),
    ({"top_p": 0.7}, {"top_p": 0.74}),
    ({"min_p": 0.1}, {"min_p": 0.12}),
    ({"top_k": 12, "top_p": 0.8}, {"top_p": 0.85}),
    ({"temperature": 1.5, "top_k": 25, "top_p": 0.9, "min_p": 0.4}, {"min_p": 0.0}),
    ({"presence_penalty": 1.5}, {"presence_penalty": 1.2}),
    ({"frequency_penalty": 0.8}, {"frequency_penalty": 0.6}),
    ({"repetition_penalty": 1.8}, {"repetition_penalty": 1.6}),
    ({"logit_bias": {3: 2.0, 9: -2.0}}, {"logit_bias": {3: 1.8, 9: -2.0}}),
    ({"allowed_token_ids": (3, 9, 11, 20, 21)}, {"allowed_token_ids": (3, 9, 11, 20)}),
    ({"bad_token_ids": (3, 9, 20)}, {"bad_token_ids": (3, 9)}),
    ({"min_new_tokens": len(OUTPUT) + 1}, {"min_new_tokens": 0}),
    (dataclasses.asdict(ALL_OPTIONS), {"repetition_penalty": 1.2}),
)
"""Options, and a change of them that the frequencies must show."""


def small_logits():
    """Logits of 64 tokens, with those that the options are about among the likely ones."""
    logits = np.random.default_rng(8).normal(0, 1.2, 64).astype(np.float32)
    logits[[3, 6, 9, 11, 30]] += 1.5
    return logits


@pytest.fixture(scope="module", params=tiered(SAMPLERS, ["native"]))
def backend(request):
    yield from patched(sys.modules[__name__], request.param)


@pytest.fixture(scope="module")
def draw(backend):
    @jax.jit
    def run(logits, rows, table):
        tiled = jnp.tile(logits, (rows.step.shape[0], 1))
        adjusted = adjust_logits(tiled, table, rows.stop_ids, rows.step)
        return sample(tiled, rows, jnp.int32(0), adjusted)

    return run


def without_63(params):
    """Forbids one token more, so that plain rows have a table too."""
    return dataclasses.replace(params, bad_token_ids=(*params.bad_token_ids, 63))


def draw_tokens(draw, logits, params):
    """DRAWS independent draws: one request's row, with a seed of its own each."""
    made = request(params)
    rows = build_sampling_batch([made], 1)
    table = build_table(
        [request(dataclasses.replace(params, bad_token_ids=(*params.bad_token_ids, 63)))],
        1,
        len(logits),
        1,
    )
    repeated = [jax.tree.map(lambda x: np.repeat(x, DRAWS, 0), tree) for tree in (rows, table)]
    seeds = np.random.default_rng(0).integers(0, 2**32, (DRAWS, 2), np.uint32)
    return draw(logits, repeated[0]._replace(seed=seeds), repeated[1])


def p_value(tokens, probs):
    """Pearson's chi-square test; cells that expect fewer than five draws are one cell."""
    counts = np.bincount(tokens, minlength=len(probs))
    expected = probs * len(tokens)
    if counts[probs == 0].any():
        return 0.0
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    used = expected > 0
    statistic = np.sum((observed[used] - expected[used]) ** 2 / expected[used])
    return scipy.stats.chi2.sf(statistic, max(used.sum() - 1, 1))


class TestFrequencies:
    @pytest.mark.parametrize(("options", "wrong"), FREQUENCY_OPTIONS)
    def test_match_the_distribution(self, draw, options, wrong):
        """40,000 draws against float64; a wrong option's distribution has p < 1e-9."""
        params = SamplingParams(**options)
        logits = small_logits()
        out = draw_tokens(draw, logits, params)
        tokens = np.asarray(out.token)
        probs = self.expected(params)
        assert p_value(tokens, probs) > 1e-3
        assert p_value(tokens, self.expected(dataclasses.replace(params, **wrong))) < 1e-9
        np.testing.assert_allclose(
            out.processed_logprob, np.log(probs[tokens]), rtol=1e-5, atol=2e-5
        )

    @staticmethod
    def expected(params):
        adjusted = adjust(small_logits(), without_63(params), PROMPT, OUTPUT, STOP_IDS)
        return distribution(adjusted, params)


@pytest.mark.usefixtures("backend")
class TestLogprobs:
    @pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
    def test_raw_scaled_and_processed(self, temperature):
        """Adjusts and filters rows; raw and scaled log-probs are of the model's own logits."""
        params = dataclasses.replace(ALL_OPTIONS, temperature=temperature)
        logits = some_logits(16, VOCAB, seed=4)
        made = [request(params, seed=i) for i in range(16)]
        adjusted, _, rows = device_adjusted(logits, made)
        out = jax.jit(sample)(jnp.asarray(logits), rows, jnp.int32(0), adjusted)
        scale = temperature or 1.0
        for row in range(16):
            token = int(out.token[row])
            raw = logits[row].astype(np.float64)
            probs = distribution(adjust(raw, params, PROMPT, OUTPUT, STOP_IDS), params)
            for got, expected in (
                (out.logprob, log_softmax(raw)[token]),
                (out.scaled_logprob, log_softmax(raw / scale)[token]),
                (out.processed_logprob, np.log(probs[token])),
            ):
                np.testing.assert_allclose(got[row], expected, atol=2e-5)
            if temperature == 0.0:
                assert out.processed_logprob[row] == 0.0

    def test_the_smallest_uniform_number_draws_no_negligible_token(self, monkeypatch):
        """A generator's 0 would draw the first token of any weight, here one of e**-60."""
        monkeypatch.setattr(random_bits, "_threefry", lambda _, count: count)
        logits = np.full((1, 300), -60.0, np.float32)
        logits[0, 200] = 0.0
        rows = build_sampling_batch([request(SamplingParams())], 1)
        assert int(jax.jit(sample)(jnp.asarray(logits), rows, jnp.int32(0)).token[0]) == 200


def test_random_numbers_are_those_of_jax():
    """A key folds the steps in; uniform numbers are the middles of the intervals."""

    def key_of(seed: jax.Array, step: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), step)

    rng = np.random.default_rng(0)
    seeds = jnp.asarray(rng.integers(0, 2**32, (200, 2), np.uint32))
    steps = jnp.asarray(rng.integers(0, 2**31, 200, np.int32))

    @jax.jit
    def expected(seeds: jax.Array, steps: jax.Array) -> tuple[jax.Array, jax.Array]:
        keys = jax.vmap(key_of)(seeds, steps)
        bits = jax.vmap(lambda key: jax.random.bits(key, (37,), jnp.uint32))(keys)
        return bits, jax.vmap(lambda key: jax.random.uniform(key, dtype=jnp.float32))(keys)

    bits, numbers = expected(seeds, steps)
    found = jax.jit(random_bits.random_bits, static_argnums=2)(seeds, steps, 37)
    np.testing.assert_array_equal(found, bits)
    found = jax.jit(random_bits.uniform)(seeds, steps)
    np.testing.assert_array_equal(found, np.asarray(numbers) + np.float32(2.0**-24))
