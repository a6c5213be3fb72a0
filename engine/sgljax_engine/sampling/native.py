"""The sampler of JIT-compiled CPU kernels: batch-invariant; see `sampling.sampler`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

import sgljax_cpu
from sgljax_engine.sampling.blocks import largest
from sgljax_engine.sampling.filters import Filters, min_p_threshold
from sgljax_engine.sampling.logprobs import ExtraLogprobs, LogprobBatch, Logprobs
from sgljax_engine.sampling.masks import drop_ties
from sgljax_engine.sampling.random_bits import uniform
from sgljax_engine.sampling.sampler import Drawn, Sampler, SamplingBatch


def _draw(
    choices_BV: jax.Array, rows: SamplingBatch, num_shards: int, most: jax.Array | None
) -> Drawn:
    del num_shards  # one device
    threshold = find_threshold(choices_BV, rows.filters)
    if most is not None:
        threshold = drop_ties(choices_BV, threshold, most)
    numbers = uniform(rows.seed, rows.step)

    def draw(
        choices: jax.Array, temperature: jax.Array, threshold: jax.Array, numbers: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        peaks = sgljax_cpu.find_peaks(choices)
        sums = sgljax_cpu.sum_weights(choices, peaks, temperature, threshold)
        return sgljax_cpu.draw(choices, peaks, sums, temperature, threshold, numbers)

    token, processed = sgljax_cpu.fuse(draw)(choices_BV, rows.temperature, threshold, numbers)
    return Drawn(token, processed, threshold)


def find_threshold(choices_BV: jax.Array, filters: Filters) -> jax.Array:
    has_top = filters.has_top(choices_BV.shape[1])

    def nothing() -> jax.Array:
        return jnp.full(len(choices_BV), -jnp.inf, jnp.float32)

    def find() -> jax.Array:
        peaks = sgljax_cpu.find_peaks(choices_BV)
        top = lax.cond(
            jnp.any(has_top),
            lambda: sgljax_cpu.top_threshold(
                choices_BV,
                peaks,
                largest(choices_BV, 1)[0],
                filters.top_k,
                filters.top_p,
                filters.inverse_temperature,
            ),
            nothing,
        )
        return jnp.maximum(top, min_p_threshold(jnp.max(peaks.values, axis=-1), filters))

    return lax.cond(jnp.any(has_top | filters.has_min_p), find, nothing)


def _logprobs(
    logits_BV: jax.Array,
    token: jax.Array,
    temperature: jax.Array,
    batch: LogprobBatch | None = None,
) -> Logprobs:
    """Log-probs of the drawn tokens and of those asked for, as `token_logprobs` gives them."""
    ids, top = token[:, None], None
    if batch is not None:
        top = lax.top_k(logits_BV, batch.ranks.shape[0])[1].astype(jnp.int32)
        ids = jnp.concatenate([ids, top, batch.token_ids], axis=1)
    ones = jnp.ones_like(temperature)
    everything = jnp.full_like(temperature, -jnp.inf)

    def compute(
        logits: jax.Array,
        temperature: jax.Array,
        ones: jax.Array,
        everything: jax.Array,
        token: jax.Array,
        ids: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        peaks = sgljax_cpu.find_peaks(logits)
        found = []
        for at, wanted in ((temperature, token), (ones, ids)):
            sums = sgljax_cpu.sum_weights(logits, peaks, at, everything)
            found.append(sgljax_cpu.logprobs(logits, peaks, sums, at, wanted))
        return found[0], found[1]

    scaled, raw = sgljax_cpu.fuse(compute)(
        logits_BV, temperature, ones, everything, token[:, None], ids
    )
    extras = None
    if batch is not None and top is not None:
        end = 1 + top.shape[1]
        extras = ExtraLogprobs(raw[:, 1:end], top, raw[:, end:])
    return Logprobs(raw[:, 0], scaled[:, 0], extras)


NATIVE = Sampler(_draw, _logprobs)
"""The JIT-compiled CPU kernels."""
