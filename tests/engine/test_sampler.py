"""Draws and log-probs of both samplers against numpy in float64."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine.sampling.filters import make_filters
from sgljax_engine.sampling.logprobs import LogprobBatch
from sgljax_engine.sampling.race import race
from sgljax_engine.sampling.sampler import SamplingBatch, sample
from sgljax_engine.sampling_params import MAX_STOP_TOKEN_IDS
from tests.engine.sampler_cases import SAMPLERS, patched
from tests.tiers import tiered


@pytest.fixture(scope="module", params=tiered(SAMPLERS, ["native"]))
def backend(request):
    yield from patched(sys.modules[__name__], request.param)


both = pytest.mark.usefixtures("backend")


def batch(
    size: int,
    vocab: int,
    *,
    temperature: Any = 1.0,
    top_k: Any = None,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    step: Any = 0,
) -> SamplingBatch:
    def spread(value: Any) -> np.ndarray:
        return np.broadcast_to(np.asarray(value), (size,))

    settings = (spread(vocab if top_k is None else top_k), spread(top_p), spread(min_p))
    temperature = spread(temperature).astype(np.float64)
    arrays: Any = (
        temperature.astype(np.float32),
        make_filters(temperature, *settings),
        np.stack([np.zeros(size), np.arange(size)], -1).astype(np.uint32),
        spread(step).astype(np.int32),
        np.full((size, MAX_STOP_TOKEN_IDS), -1, np.int32),
    )
    return SamplingBatch(*arrays)


def seeds_and_steps(count, seed=0):
    seeds = np.stack([np.full(count, seed), np.arange(count)], -1).astype(np.uint32)
    return jnp.asarray(seeds), jnp.arange(count, dtype=jnp.int32)


@pytest.mark.parametrize("vocab", [129, 5120])
def test_a_race_draws_each_token_as_often_as_it_weighs(vocab):
    rng = np.random.default_rng(vocab)
    weights = rng.random(vocab).astype(np.float32) * (rng.random(vocab) < 0.3)
    weights[vocab // 2] = 1.0
    num_draws = 40_000
    rows = jnp.broadcast_to(jnp.asarray(weights), (num_draws // 10, vocab))
    draw = jax.jit(race)
    tokens = np.concatenate(
        [draw(rows, *seeds_and_steps(len(rows), seed=seed)) for seed in range(10)]
    )
    counts = np.bincount(tokens, minlength=vocab)
    probs = weights.astype(np.float64) / weights.sum(dtype=np.float64)
    assert (counts[weights == 0] == 0).all()
    # Neighbours together, so that every count is large; 6 standard deviations of chi-square.
    edges = np.searchsorted(np.cumsum(probs), np.linspace(0, 1, 51)[:-1])
    edges = np.unique(np.minimum(edges, vocab - 1))
    expected = np.add.reduceat(probs, edges) * num_draws
    found = np.add.reduceat(counts, edges)
    is_used = expected > 0
    square = np.sum((found - expected)[is_used] ** 2 / expected[is_used])
    degrees = max(is_used.sum() - 1, 1)
    assert square < degrees + 6 * np.sqrt(2 * degrees)


def test_a_race_of_a_filtered_real_vocabulary():
    vocab, batch_size = 151_936, 64
    rng = np.random.default_rng(0)
    weights = np.zeros((batch_size, vocab), np.float32)
    for row in weights:
        kept = rng.choice(vocab, rng.integers(20, 400), replace=False)
        row[kept] = rng.random(len(kept), np.float32)
        row[kept[0]] = 1.0
    draw = jax.jit(race)
    for seed in range(4):
        tokens = np.asarray(draw(weights, *seeds_and_steps(batch_size, seed)))
        assert (weights[np.arange(batch_size), tokens] > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "spread",
    [2.0, *(pytest.param(each, marks=pytest.mark.soak) for each in (0.3, 6.0))],
    ids=["long-tailed", "flat", "peaked"],
)
def test_rounding_errors_change_no_draw(spread):
    """Among 1024 draws from 32,768 tokens, inverting the distribution changes 1 to 3."""
    vocab, count = 32_768, 256
    rng = np.random.default_rng(1)
    draw = jax.jit(sample)
    for step in range(4):
        logits = rng.normal(0, spread, (count, vocab)).astype(np.float32)
        errors = rng.uniform(-2e-6, 2e-6, logits.shape).astype(np.float32)
        one, other = (
            np.asarray(draw(jnp.asarray(x), batch(count, vocab, step=step), jnp.int32(0)).token)
            for x in (logits, logits + errors)
        )
        np.testing.assert_array_equal(one, other)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("vocab", "num_shards"),
    [(8 * 151, 2), (8 * 37, 8), (4096, 8)],
)
def test_shards_of_the_vocabulary_change_no_token(vocab, num_shards):
    """Blocks and groups begin anew in each shard, so that padding lies between them."""
    rng = np.random.default_rng(6)
    logits = jnp.asarray(rng.normal(0, 3, (24, vocab)).astype(np.float32))
    rows = batch(
        24,
        vocab,
        temperature=rng.choice([0.0, 0.7, 1.0], 24),
        top_k=rng.choice([vocab, 5, 200], 24),
        top_p=rng.choice([1.0, 0.9, 0.3], 24),
        min_p=rng.choice([0.0, 0.05], 24),
    )
    draw = jax.jit(sample, static_argnames="num_shards")
    whole, shared = (draw(logits, rows, jnp.int32(0), num_shards=n) for n in (1, num_shards))
    np.testing.assert_array_equal(whole.token, shared.token)
    for ours, theirs in zip(whole[1:4], shared[1:4], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@both
def test_draw_depends_on_seed_and_step_only():
    logits = jnp.asarray(np.random.default_rng(2).normal(0, 1, (8, 1000)).astype(np.float32))
    rows, draw = batch(8, 1000), jax.jit(sample)
    first = np.asarray(draw(logits, rows, jnp.int32(0)).token)
    np.testing.assert_array_equal(first, draw(logits, rows, jnp.int32(0)).token)
    later = np.asarray(draw(logits, rows, jnp.int32(5)).token)
    assert (first != later).any()
    shifted = rows._replace(step=np.full(8, 5, np.int32))
    np.testing.assert_array_equal(later, draw(logits, shifted, jnp.int32(0)).token)


@both
@pytest.mark.parametrize(
    "vocab", [*(pytest.param(size, marks=pytest.mark.soak) for size in (1, 129)), 1000]
)
def test_greedy_rows_take_the_first_of_the_largest(vocab):
    rng = np.random.default_rng(vocab)
    logits = rng.integers(-3, 3, (64, vocab)).astype(np.float32)  # ties, within blocks and across
    adjusted = np.where(rng.random(logits.shape) < 0.5, -np.inf, logits).astype(np.float32)
    adjusted[:, -1] = -1e30  # finite, and now and then the largest
    adjusted[:8, :-1] = -np.inf
    rows = batch(64, vocab, temperature=0.0)
    draw = jax.jit(sample)
    tokens = draw(jnp.asarray(logits), rows, jnp.int32(0), jnp.asarray(logits)).token
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    tokens = draw(jnp.asarray(logits), rows, jnp.int32(0), jnp.asarray(adjusted)).token
    np.testing.assert_array_equal(tokens, adjusted.argmax(-1))


@both
@pytest.mark.parametrize("vocab", [pytest.param(40, marks=pytest.mark.soak), 10_000])
def test_a_token_has_one_logprob(vocab):
    """In the lists of the most likely and of given tokens as where it is sampled, to the bit."""
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 2, (33, vocab)).astype(np.float32)
    rows = batch(33, vocab, temperature=rng.choice([0.0, 0.7, 1.0], 33), top_k=8)
    ids = rng.integers(0, vocab, (33, 5), np.int32)
    wanted = LogprobBatch(jnp.asarray(ids), jnp.zeros(8, jnp.int32))
    out = jax.jit(sample)(logits, rows, jnp.int32(0), others=wanted)
    assert out.extras is not None
    tokens, tops = np.asarray(out.token), np.asarray(out.extras.token_ids)
    places = np.argwhere(tops == tokens[:, None])
    assert len(places) == 33
    np.testing.assert_array_equal(np.asarray(out.extras.values)[tuple(places.T)], out.logprob)
    # The sampled tokens as given ones.
    given = LogprobBatch(jnp.asarray(np.repeat(tokens[:, None], 5, 1)), wanted.ranks)
    again = jax.jit(sample)(logits, rows, jnp.int32(0), others=given)
    assert again.extras is not None
    np.testing.assert_array_equal(again.extras.chosen, np.repeat(out.logprob[:, None], 5, 1))
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(-1))[:, None]
    chosen = np.take_along_axis(exact, ids, 1)
    np.testing.assert_allclose(out.extras.chosen, chosen, atol=2e-5)
    is_plain = np.isin(rows.temperature, [0.0, 1.0])
    np.testing.assert_array_equal(out.scaled_logprob[is_plain], out.logprob[is_plain])
