"""Pages before a window may be the null page: no backend gives its zeros any weight."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sgljax_cpu
from sgljax_engine.attention.base import Attention, AttentionOptions
from sgljax_engine.attention.cpu import NativeAttention
from sgljax_engine.attention.pallas import PallasAttention
from sgljax_engine.attention.tpu import TpuAttention
from sgljax_engine.attention.xla import XlaAttention
from tests.engine.paged_cases import RaggedCase, case_of
from tests.tiers import tiered

PAGE = 16
CASES = {
    "decode": (1, AttentionOptions(scale=0.2, sliding_window=20)),
    "prefill": (16, AttentionOptions(scale=0.5, sliding_window=70, logit_softcap=2.0)),
}
"""Queries of a block, and options."""
BACKENDS: dict[str, Attention] = {
    "native": NativeAttention(),
    "xla": XlaAttention(),
    "pallas": PallasAttention(interpret=True),
    "tpu": TpuAttention(interpret=True),
}
PAIRS = [*itertools.product(BACKENDS, CASES)]
FAST = [("native", "decode"), ("native", "prefill"), ("xla", "prefill")]
SLOW = [("xla", "decode"), ("pallas", "prefill"), ("tpu", "decode")]


def case_without(name: str, head_dim: int) -> tuple[RaggedCase, AttentionOptions]:
    """A case whose tables have a page of zeros for each page before a block's window."""
    num_queries, options = CASES[name]
    case = case_of((PAGE, 4, 2, num_queries, head_dim))
    table = np.array(case.tables.page_table)
    rows = list(zip(table[:-1], case.keys, strict=True))
    used = {int(page) for row, keys in rows for page in row[: -(-len(keys) // PAGE)]}
    null = next(page for page in range(case.layer.k.shape[0]) if page not in used)
    assert options.sliding_window is not None
    num_freed = 0
    for block, keys in enumerate(case.keys):
        first = max(len(keys) - num_queries - options.sliding_window + 1, 0) // PAGE
        table[block, :first] = null
        num_freed += first
    assert num_freed > 0
    layer = jax.tree.map(lambda pages: pages.at[null].set(0), case.layer)
    tables = case.tables._replace(page_table=jnp.asarray(table))
    return case._replace(layer=layer, tables=tables), options


@pytest.mark.parametrize("pair", tiered(PAIRS, FAST, SLOW), ids="-".join)
def test_reading(pair):
    backend, name = pair
    if backend == "native" and sgljax_cpu.unavailable() is not None:
        pytest.skip(f"no JIT-compiled CPU kernels here: {sgljax_cpu.unavailable()}")
    case, options = case_without(name, head_dim=128 if backend == "tpu" else 16)
    case.check(case.run(BACKENDS[backend].attend, options), options, atol=2e-5)
