"""The tokens that the filters of both samplers keep, against a sort in float64.

`test_what_is_wrong_is_found` is the negative control of the checks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_cpu import chain
from sgljax_engine.sampling import filters, pairs
from sgljax_engine.sampling.filters import KEEP_ALL
from sgljax_engine.sampling.sampler import SamplingBatch, sample
from tests.devices import run_python
from tests.engine.filter_cases import (
    VOCABULARIES,
    Case,
    kept_in_float64,
    native_threshold,
    random_cases,
    wrong_rows,
    xla_threshold,
)
from tests.engine.sampler_cases import SAMPLERS
from tests.tiers import tiered


@dataclasses.dataclass(frozen=True)
class Backend:
    """A sampler, and its threshold [B] by itself."""

    name: str
    threshold: Callable[[jax.Array, SamplingBatch], jax.Array]

    def __post_init__(self) -> None:
        chosen = SAMPLERS[self.name]
        run = jax.jit(lambda logits, rows: sample(logits, rows, jnp.int32(0), sampler=chosen))
        object.__setattr__(self, "sample", run)

    def check_kept(self, case: Case) -> None:
        """Compares which tokens are kept."""
        thresholds = self.threshold(jnp.asarray(case.logits), case.rows())
        assert wrong_rows(case, np.asarray(thresholds)) == []

    def check(self, case: Case) -> int:
        """Compares kept tokens, and the log-prob of the drawn one; returns the number of rows."""
        self.check_kept(case)
        rows, logits = case.rows(), jnp.asarray(case.logits)
        out = jax.device_get(self.sample(logits, rows))  # type: ignore[attr-defined]
        for row, (token, found) in enumerate(zip(out.token, out.processed_logprob, strict=True)):
            kept = kept_in_float64(case, row)
            assert kept.mask[token]
            assert abs(kept.logprobs[token] - found) < 3e-5
        return len(case.logits)


@pytest.fixture(scope="module", params=tiered(SAMPLERS, ["native"]))
def backend(request):
    if request.param == "native" and chain.unavailable() is not None:
        pytest.skip(f"no JIT-compiled CPU kernels here: {chain.unavailable()}")
    return Backend(request.param, {"xla": xla_threshold, "native": native_threshold}[request.param])


VOCAB, NUM_ROWS = 3000, 16
"""One shape for all tests of special rows, so that few programs are compiled."""


def case_of(
    logits: Any,
    *,
    temperature: Any = 1.0,
    top_k: Any = KEEP_ALL,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
) -> Case:
    """Rows [N, VOCAB] or one, repeated to NUM_ROWS; settings of all or of each."""

    def repeated(values: Any) -> np.ndarray:
        return np.resize(np.asarray(values), NUM_ROWS)

    rows = np.resize(np.asarray(logits, np.float32), (NUM_ROWS, VOCAB))
    settings = (temperature, top_k, top_p, min_p)
    return Case(rows, *map(repeated, settings))


@pytest.mark.parametrize(
    "vocabularies",
    [(65,), *(pytest.param(each, marks=pytest.mark.soak) for each in ((64, 65), (50_257,)))],
)
def test_random_rows(backend, vocabularies):
    cases = random_cases(1, 160 * len(vocabularies), vocabularies)
    assert sum(map(backend.check, cases)) == 160 * len(vocabularies)


@pytest.mark.soak
def test_random_rows_of_all_vocabularies(backend):
    """Tests some of ten thousand: `python -m tests.engine.filter_cases` does all."""
    for case in random_cases(2, 416, VOCABULARIES):
        backend.check_kept(case)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.3, 5, 1.0), (1.7, 20, 0.7), (0.55, 3, 1.0)],
)
def test_temperatures_of_which_the_reciprocal_rounds_otherwise(backend, temperature, top_k, top_p):
    rng = np.random.default_rng(3)
    for _ in range(10):
        logits = rng.normal(0, 2, (NUM_ROWS, VOCAB))
        backend.check_kept(case_of(logits, temperature=temperature, top_k=top_k, top_p=top_p))


def test_what_is_wrong_is_found(backend):
    """The checks can fail: without the k-th token, and at another temperature."""
    case = case_of(np.random.default_rng(4).normal(0, 2, (NUM_ROWS, VOCAB)), top_k=5, top_p=0.9)
    thresholds = np.asarray(backend.threshold(jnp.asarray(case.logits), case.rows()))
    assert wrong_rows(case, thresholds) == []
    dropped = np.nextafter(thresholds, np.float32(np.inf))
    assert wrong_rows(case, dropped) == list(range(NUM_ROWS))
    flat = case_of(np.random.default_rng(5).normal(0, 1, (NUM_ROWS, VOCAB)), top_p=0.9)
    other = flat._replace(temperature=flat.temperature * 1.01)
    thresholds = np.asarray(backend.threshold(jnp.asarray(flat.logits), other.rows()))
    assert wrong_rows(flat, thresholds) == list(range(NUM_ROWS))


def test_ties_with_the_threshold_are_kept(backend):
    """Half of the vocabulary is as likely as the k-th token, in and beyond the sorted logits."""
    for num_likely in (50, VOCAB // 2):
        row = np.full(VOCAB, -5.0)
        row[:num_likely] = -2.0
        row[:2] = 0.0, -1.0
        for settings in ({"top_k": 3}, {"top_k": 60}, {"top_k": 200}, {"top_p": 0.5}):
            backend.check_kept(case_of(row, **settings))


def test_zeros_of_both_signs_are_ties(backend):
    row = np.where(np.arange(VOCAB) % 2, 0.0, -0.0)
    row[:3] = 1.0
    backend.check_kept(case_of(row, top_k=100, top_p=0.9))
    backend.check_kept(case_of(row, top_k=4))


def test_forbidden_tokens_are_never_kept(backend):
    """Though there are fewer others than top_k."""
    logits = np.full((2, VOCAB), -np.inf)
    logits[0, [7, 2999]], logits[1, 1234] = [0.0, -1.0], 0.0
    for top_k, top_p in ((50, 1.0), (500, 1.0), (3000, 0.999), (50, 0.999), (2999, 0.5)):
        backend.check_kept(case_of(logits, top_k=top_k, top_p=top_p, min_p=0.1))


def test_settings_at_their_ends(backend):
    """Denormal and nearly whole probabilities, the least and the largest temperature."""
    logits = np.random.default_rng(6).normal(0, 3, (NUM_ROWS, VOCAB))
    for temperature in (1e-5, 0.01, 1.0, 100.0, 1e6):
        for top_p in (1e-50, 1e-40, 1e-7, 1 - 1e-7, 1 - 1e-9):
            backend.check_kept(case_of(logits, temperature=temperature, top_p=top_p))
        for min_p in (1e-40, 1e-7, 1 - 1e-7, 1.0):
            backend.check_kept(case_of(logits, temperature=temperature, min_p=min_p))


def test_a_rows_nucleus_does_not_depend_on_its_mates(backend):
    """Nuclei that end almost exactly at a token, alone and beside a flat row."""
    rng = np.random.default_rng(5)
    rows, count = np.arange(NUM_ROWS), NUM_ROWS
    peaked = 4.0 * rng.standard_normal((count, VOCAB)).astype(np.float32)
    below = peaked.astype(np.float64) - peaked.max(-1, keepdims=True)
    mass = np.cumsum(np.sort(np.exp(below))[:, ::-1], axis=-1)
    top_p = mass[rows, rng.integers(2, 30, count)] / mass[:, -1] * (1 + 1e-9)
    alone = case_of(peaked, top_p=top_p)
    backend.check_kept(alone)
    peaked[-1], top_p[-1] = 0.0, 0.9
    mixed = case_of(peaked, top_p=top_p)
    found = np.asarray(backend.threshold(jnp.asarray(mixed.logits), mixed.rows()))
    expected = np.asarray(backend.threshold(jnp.asarray(alone.logits), alone.rows()))
    np.testing.assert_array_equal(found[:-1], expected[:-1])
    assert found[-1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("num_shards", [pytest.param(2, marks=pytest.mark.soak), 8])
def test_parts_of_the_vocabulary(num_shards):
    """As devices have them that share it."""
    for case in random_cases(7, 32, (1024,)):
        thresholds = xla_threshold(jnp.asarray(case.logits), case.rows(), num_shards)
        assert wrong_rows(case, np.asarray(thresholds)) == []


_ON_DEVICES = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from tests.engine.filter_cases import random_cases, wrong_rows, xla_threshold
mesh = jax.make_mesh((8,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
for case in random_cases(8, 192, (128, 1000, 151_936)):
    logits = jax.device_put(case.logits, NamedSharding(mesh, P(None, "tp")))
    rows = jax.device_put(case.rows(), NamedSharding(mesh, P()))
    assert wrong_rows(case, np.asarray(xla_threshold(logits, rows, 8))) == []
print("equal")
"""


@pytest.mark.soak
def test_devices_that_share_the_vocabulary():
    found = run_python("-c", _ON_DEVICES, num_devices=8)
    assert "equal" in found.stdout


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
def test_on_a_gpu():
    portable = Backend("xla", xla_threshold)
    cases = random_cases(9, 1920, (64, 1000, 151_936))
    assert sum(map(portable.check, cases)) == 1920


class TestPairs:
    """Numbers of 48 bits, against float64."""

    def values(self, seed, low, high):
        rng = np.random.default_rng(seed)
        return rng.uniform(low, high, 20_000)

    def pair(self, values):
        return pairs.pair_of(jnp.asarray(pairs.split_doubles(values)))

    def double(self, pair):
        return np.asarray(pair.hi, np.float64) + np.asarray(pair.lo, np.float64)

    def test_sums_and_products(self):
        a, b = self.values(1, -30, 30), self.values(2, -30, 30)
        total, product = jax.jit(lambda a, b: (a + b, a * b))(self.pair(a), self.pair(b))
        scale = np.maximum(abs(a), abs(b))
        assert (abs(self.double(total) - (a + b)) / scale).max() < 2.0**-45
        assert (abs(self.double(product) - a * b) / abs(a * b)).max() < 2.0**-44

    def test_exponentials(self):
        x = np.concatenate([self.values(3, -60, 0), self.values(4, -1, 1), [0.0, -81.0, -1e30]])
        found = self.double(jax.jit(pairs.exp)(self.pair(x)))
        expected = np.where(x < pairs.SMALLEST, 0.0, np.exp(x))
        assert (abs(found - expected) <= 4e-12 * expected).all()

    def test_sums_of_many(self):
        values = np.append(self.values(5, 0, 1) ** 8, 1.0)
        parts = pairs.limbs(self.pair(values))
        found = self.double(pairs.join_limbs(tuple(jnp.sum(part) for part in parts)))
        assert abs(found / values.sum() - 1) < 1e-12


def test_min_p_has_the_least_float_at_or_above_its_limit():
    rng = np.random.default_rng(7)
    peak = rng.normal(0, 20, 5000).astype(np.float32)
    made = filters.make_filters(
        rng.uniform(0.1, 3, 5000), np.full(5000, KEEP_ALL), np.ones(5000), rng.uniform(0, 1, 5000)
    )
    gap = np.asarray(made.min_p_gap, np.float64).sum(-1)
    found = np.asarray(jax.jit(filters.min_p_threshold)(peak, made), np.float64)
    limit = peak.astype(np.float64) + gap
    below = np.nextafter(found.astype(np.float32), np.float32(-np.inf)).astype(np.float64)
    assert (found >= limit - 1e-12).all()
    assert (below < limit + 1e-12).all()
