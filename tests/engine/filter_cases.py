"""Random rows of logits and settings, and the tokens that a sort in float64 keeps of them.

    python -m tests.engine.filter_cases native 10000

compares as many rows with a sampler, "native" or "xla", and prints how many differ.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from sgljax_engine.sampling import native, sampler
from sgljax_engine.sampling.filters import KEEP_ALL, Filters, make_filters
from sgljax_engine.sampling.sampler import SamplingBatch
from sgljax_engine.sampling_params import MAX_STOP_TOKEN_IDS

VOCABULARIES = (40, 63, 64, 65, 97, 128, 1000, 1024, 5120, 32_000, 50_257, 151_936, 152_064)
ROWS = 32


class Case(NamedTuple):
    """Rows of one vocabulary.

    Shape: logits: [B, V] float32. The others: [B], float64 but for top_k.
    """

    logits: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray

    @property
    def filters(self) -> Filters:
        """As the engine's host code makes them."""
        return make_filters(self.temperature, self.top_k, self.top_p, self.min_p)

    def rows(self, seed: int = 0) -> SamplingBatch:
        """As the engine's host code makes them."""
        size = len(self.logits)
        seeds = np.stack([np.full(size, seed), np.arange(size)], axis=-1).astype(np.uint32)
        stop_ids = np.full((size, MAX_STOP_TOKEN_IDS), -1, np.int32)
        temperature = self.temperature.astype(np.float32)
        arrays = temperature, self.filters, seeds, np.zeros(size, np.int32), stop_ids
        return SamplingBatch(*arrays)  # type: ignore[arg-type]


def _logits(rng: np.random.Generator, size: int) -> np.ndarray:
    """One of: smooth, flat, with a heavy head, of bfloat16, of few values, with forbidden ones."""
    kind = rng.integers(6)
    scale = np.exp(rng.uniform(np.log(0.05), np.log(8)))
    row = rng.normal(0, scale, size)
    if kind == 1:
        row = rng.normal(rng.uniform(-20, 20), 0.01, size)
    elif kind == 2:
        row[rng.integers(size, size=3)] += rng.uniform(2, 12, 3)
    elif kind == 3:
        row = row.astype(ml_dtypes.bfloat16)
    elif kind == 4:
        row = np.round(row * 4) / 4
    elif kind == 5:
        row[rng.random(size) < 0.5] = -np.inf
        row[rng.integers(size)] = 1.0
    return row.astype(np.float32)


def _setting(rng: np.random.Generator, size: int) -> tuple[float, int, float, float]:
    temperature = float(np.exp(rng.uniform(np.log(0.05), np.log(5))))
    if rng.random() < 0.5:
        temperature = max(round(temperature, 2), 0.05)  # what people write
    top_k = KEEP_ALL
    if rng.random() < 0.6:
        largest = size if rng.random() < 0.4 else min(size, 80)
        top_k = int(np.exp(rng.uniform(0, np.log(largest)))) if rng.random() < 0.7 else 64
    top_p = 1.0
    if rng.random() < 0.7:
        top_p = [rng.uniform(0.01, 1), 0.95, 0.9, 1 - 10 ** rng.uniform(-5, -1)][rng.integers(4)]
    min_p = 0.0
    if rng.random() < 0.4:
        min_p = float(np.exp(rng.uniform(np.log(1e-6), 0)))
    return temperature, max(top_k, 1), float(top_p), min_p


def random_cases(seed: int, count: int, vocabularies: tuple[int, ...]) -> Iterator[Case]:
    """At least so many rows, by case, of each vocabulary about as many."""
    rng = np.random.default_rng(seed)
    for index in range(-(-count // ROWS)):
        size = vocabularies[index % len(vocabularies)]
        settings = np.array([_setting(rng, size) for _ in range(ROWS)])
        logits = np.stack([_logits(rng, size) for _ in range(ROWS)])
        temperature, top_k, top_p, min_p = settings.T
        yield Case(logits, temperature, top_k.astype(np.int64), top_p, min_p)


class KeptTokens(NamedTuple):
    """What float64 keeps of a row.

    Attributes:
        mask: [V] bool.
        logprobs: [V] float64, in the distribution of what is kept.
    """

    mask: np.ndarray
    logprobs: np.ndarray


def kept_in_float64(case: Case, row: int) -> KeptTokens:
    """The kept tokens, by sorting; ties with the last one that is kept are kept."""
    logits = case.logits[row].astype(np.float64)
    scaled = (logits - logits.max()) / case.temperature[row]
    weights = np.exp(scaled)
    order = np.argsort(-logits, kind="stable")
    mask = np.ones(len(logits), bool)
    if case.top_k[row] < len(logits):
        mask = logits >= logits[order[case.top_k[row] - 1]]
    if case.top_p[row] < 1:
        in_order = np.where(mask, weights, 0.0)[order]
        before = np.cumsum(in_order) - in_order
        num_kept = np.count_nonzero(before < case.top_p[row] * in_order.sum())
        mask = mask & (logits >= logits[order[num_kept - 1]])
    mask = mask & (weights >= case.min_p[row])
    with np.errstate(divide="ignore"):
        return KeptTokens(mask, scaled - np.log(weights[mask].sum()))


@functools.partial(jax.jit, static_argnames="num_shards")
def xla_threshold(logits: jax.Array, rows: SamplingBatch, num_shards: int = 1) -> jax.Array:
    """The threshold [B] of the portable sampler."""
    peak = jnp.max(logits, axis=-1)
    scaled = (logits - peak[:, None]) / sampler.divisor(rows.temperature)[:, None]
    return sampler.find_threshold(logits, jnp.exp(scaled), peak, rows.filters, num_shards)


@jax.jit
def native_threshold(logits: jax.Array, rows: SamplingBatch) -> jax.Array:
    """The threshold [B] of the JIT-compiled CPU kernels."""
    return native.find_threshold(logits, rows.filters)


def wrong_rows(case: Case, thresholds: np.ndarray) -> list[int]:
    """Rows whose kept tokens are others than float64's. Tokens without weight do not count."""
    wrong = []
    for row, threshold in enumerate(thresholds):
        expected = kept_in_float64(case, row).mask
        counts = np.isfinite(case.logits[row])
        if ((case.logits[row] >= threshold) != expected)[counts].any():
            wrong.append(row)
    return wrong


def main() -> None:
    """Compares random rows of all vocabularies; exits with 1 when one differs."""
    name, count = sys.argv[1], int(sys.argv[2])
    threshold = {"xla": xla_threshold, "native": native_threshold}[name]
    num_rows = num_wrong = 0
    for case in random_cases(2, count, VOCABULARIES):
        found = np.asarray(threshold(jnp.asarray(case.logits), case.rows()))
        num_rows, num_wrong = num_rows + ROWS, num_wrong + len(wrong_rows(case, found))
    is_quick = jax.config.read("jax_disable_most_optimizations")
    options = "with little optimisation" if is_quick else "as users compile"
    line = f"{name}, {options}, jax {jax.__version__}: {num_wrong} of {num_rows} rows differ"
    sys.stdout.write(line + "\n")
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    main()
