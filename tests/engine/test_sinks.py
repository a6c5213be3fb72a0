"""Attention with sinks, of every backend, against numpy in float64: see `NewTokens.sinks`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine.attention.base import AttentionOptions, NewTokens, Prologue
from sgljax_engine.attention.cpu import NativeAttention
from sgljax_engine.attention.pallas import PallasAttention
from sgljax_engine.attention.tpu import TpuAttention
from sgljax_engine.attention.xla import XlaAttention
from sgljax_engine.kernels.gpu.paged_attention import Scores
from sgljax_engine.kernels.gpu.prefill_attention import prefill_attention
from sgljax_engine.runner.programs.attend import slots_at
from tests.engine.native_cases import needs_machine_code
from tests.engine.paged_cases import OPTIONS, RaggedCase, case_of
from tests.tiers import tiered

BACKENDS: dict[str, Any] = {
    "xla": XlaAttention(),
    "native": NativeAttention(),
    "pallas": PallasAttention(interpret=True),
    "invariant": PallasAttention(is_invariant=True, interpret=True),
    "tpu": TpuAttention(interpret=True),
}
SHAPES = {
    # page_size, num_heads, num_kv_heads, num_queries, head_dim
    "decode": (4, 6, 2, 1, 64),
    "prefill": (16, 6, 3, 16, 16),
}


def sinks_of(case: RaggedCase) -> np.ndarray:
    """Sinks of little weight, of about that of the keys, and of nearly all."""
    return np.resize([-3.0, 0.5, 4.0, 9.0], case.queries.shape[2]).astype(np.float32)


@pytest.mark.parametrize("options", tiered(["default", "window-20", "all"], ["window-20"]))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=needs_machine_code if name == "native" else ()) for name in BACKENDS],
)
def test_a_sink_is_a_key_without_a_value(backend, shape, options):
    case = case_of(SHAPES[shape])
    sinks = sinks_of(case)
    out = case.run(BACKENDS[backend].attend, OPTIONS[options], sinks)
    case.check(out, OPTIONS[options], 2e-5, sinks)


@pytest.mark.parametrize("options", tiered(["default", "window-20", "all"], ["all"]))
def test_tiles_of_prompts(options):
    case = case_of((16, 8, 2, 16, 32))

    def attend(q: Any, layer: Any, tables: Any, options: AttentionOptions, sinks: Any) -> jax.Array:
        scores = Scores(*options)
        return prefill_attention(
            q, layer.k, layer.v, *tables[:3], options=scores, sinks=sinks, interpret=True
        )

    sinks = sinks_of(case)
    case.check(case.run(attend, OPTIONS[options], sinks), OPTIONS[options], 2e-5, sinks)


@pytest.mark.parametrize(
    ("attention", "shape"),
    [
        (PallasAttention(is_fused=True, interpret=True), (4, 6, 2, 1, 64)),
        (TpuAttention(interpret=True), (16, 4, 2, 1, 128)),
        (TpuAttention(interpret=True), (16, 4, 2, 8, 128)),
    ],
)
@pytest.mark.parametrize("options", tiered(["window-20", "all"], ["window-20"]))
def test_kernels_that_write_keys(attention, shape, options):
    """The newest tokens' keys are in the pages already, and are written there once more."""
    case = case_of(shape)
    count, tables, sinks = shape[3], case.tables, sinks_of(case)
    num_unused = len(case.queries) - len(case.keys)
    k, v = (
        np.concatenate(
            [*(each[-count:] for each in of), np.zeros((count * num_unused, *shape[2::2]))]
        )
        for of in (case.keys, case.values)
    )
    q = case.queries.reshape(-1, *case.queries.shape[2:])
    half = shape[4] // 2
    still = Prologue(jnp.zeros((len(q), 1, half)), jnp.ones((len(q), 1, half)))
    q, k, v = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    new = NewTokens(q, k, v, sinks=jnp.asarray(sinks))
    if attention.takes_projections:
        new = new._replace(prologue=still)
    table = jnp.repeat(tables.page_table, count, axis=0)
    positions = tables.positions.reshape(-1)
    is_used = positions < jnp.repeat(tables.kv_lens, count)
    slots = slots_at(table, positions, is_used, shape[0])
    run = jax.jit(functools.partial(attention.write_and_attend), static_argnums=4)
    out, _ = run(new, case.layer, tables, slots, OPTIONS[options])
    out = np.nan_to_num(np.asarray(out)).reshape(case.queries.shape)
    case.check(out, OPTIONS[options], 2e-5, sinks)
