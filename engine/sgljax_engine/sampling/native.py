"""The sampler of JIT-compiled CPU kernels: batch-invariant; see `sampling.sampler`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from sgljax_engine.kernels.cpu import sampling as kernels
from sgljax_engine.kernels.cpu.fusion import fuse
from sgljax_engine.kernels.cpu.sampling_threshold import find_threshold
from sgljax_engine.sampling.logprobs import ExtraLogprobs, LogprobBatch, Logprobs
from sgljax_engine.sampling.sampler import (
    Sampler,
    SamplingBatch,
    divisor,
    filters_of,
    largest,
    uniform,
)


def _draw(
    choices_BV: jax.Array, rows: SamplingBatch, num_shards: int
) -> tuple[jax.Array, jax.Array]:
    """See `Sampler`."""
    del num_shards  # one device
    batch, vocab_size = choices_BV.shape
    top_k, top_p, min_p = filters_of(rows, vocab_size)

    def find() -> jax.Array:
        peaks = kernels.find_peaks(choices_BV)
        peak = jnp.max(peaks.values, axis=-1, keepdims=True)
        scaled = (choices_BV - peak) / divisor(rows.temperature)[:, None]
        sorted_ = largest(scaled, 1)
        return find_threshold(choices_BV, peaks, rows.temperature, sorted_, top_k, top_p)

    threshold = lax.cond(
        jnp.any((top_k < vocab_size) | (top_p < 1.0)),
        find,
        lambda: jnp.full(batch, -jnp.inf, jnp.float32),
    )
    filters = kernels.Filters(threshold, min_p)
    numbers = uniform(rows.seed, rows.step)

    def draw(
        choices: jax.Array, temperature: jax.Array, filters: kernels.Filters, numbers: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        peaks = kernels.find_peaks(choices)
        sums = kernels.sum_weights(choices, peaks, temperature, filters)
        return kernels.draw(choices, peaks, sums, temperature, filters, numbers)

    return fuse(draw)(choices_BV, rows.temperature, filters, numbers)


def _logprobs(
    logits_BV: jax.Array,
    token: jax.Array,
    temperature: jax.Array,
    batch: LogprobBatch | None = None,
) -> Logprobs:
    """See `token_logprobs`."""
    ids, top = token[:, None], None
    if batch is not None:
        top = lax.top_k(logits_BV, batch.ranks.shape[0])[1].astype(jnp.int32)
        ids = jnp.concatenate([ids, top, batch.token_ids], axis=1)
    ones = jnp.ones_like(temperature)
    everything = kernels.Filters(jnp.full_like(temperature, -jnp.inf), jnp.zeros_like(temperature))

    def compute(
        logits: jax.Array,
        temperature: jax.Array,
        ones: jax.Array,
        everything: kernels.Filters,
        token: jax.Array,
        ids: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        peaks = kernels.find_peaks(logits)
        found = []
        for at, wanted in ((temperature, token), (ones, ids)):
            sums = kernels.sum_weights(logits, peaks, at, everything)
            found.append(kernels.logprobs(logits, peaks, sums, at, wanted))
        return found[0], found[1]

    scaled, raw = fuse(compute)(logits_BV, temperature, ones, everything, token[:, None], ids)
    extras = None
    if batch is not None and top is not None:
        end = 1 + top.shape[1]
        extras = ExtraLogprobs(raw[:, 1:end], top, raw[:, end:])
    return Logprobs(raw[:, 0], scaled[:, 0], extras)


NATIVE = Sampler(_draw, _logprobs)
"""The JIT-compiled CPU kernels."""
