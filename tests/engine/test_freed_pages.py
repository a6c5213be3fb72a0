"""Pages before a window may be the null page: no backend gives its zeros any weight."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from sgljax_engine.attention.batch_invariant import ordered_backend

from sgljax_engine.attention.base import AttentionOptions
from sgljax_engine.attention.cpu import native_attention
from sgljax_engine.attention.pallas import PallasAttention
from sgljax_engine.attention.registry import PORTABLE
from sgljax_engine.attention.tpu import TpuAttention
from sgljax_engine.cache.kv_pages import LayerKV
from tests.engine.native_cases import needs_machine_code
from tests.engine.paged_cases import RaggedCase, case_of
from tests.tiers import tiered

PAGE = 16
CASES = {
    "decode": (1, AttentionOptions(scale=0.2, sliding_window=20)),
    "prefill": (16, AttentionOptions(scale=0.5, sliding_window=70, logit_softcap=2.0)),
}
"""Queries of a block, and options."""
BACKENDS: dict[str, Any] = {
    **PORTABLE,
    "ordered": ordered_backend("cpu"),
    "ordered-accelerator": ordered_backend("gpu"),
    "pallas": PallasAttention(interpret=True),
    "tpu": TpuAttention(interpret=True).attend,
}
PAIRS = [(backend, case) for backend in BACKENDS for case in CASES]
SLOW = [(backend, [*CASES][index % 2]) for index, backend in enumerate(BACKENDS)]


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
    layer = LayerKV(*(pages.at[null].set(0) for pages in case.layer))
    tables = case.tables._replace(page_table=jnp.asarray(table))
    return case._replace(layer=layer, tables=tables), options


@pytest.mark.parametrize("pair", tiered(PAIRS, (), SLOW), ids="-".join)
def test_reading(pair):
    backend, name = pair
    case, options = case_without(name, head_dim=128 if backend == "tpu" else 16)
    case.check(case.run(BACKENDS[backend], options), options, atol=2e-5)


@needs_machine_code
@pytest.mark.parametrize("name", CASES)
def test_jit_compiled_kernels(name):
    case, options = case_without(name, head_dim=16)
    case.check(case.run(native_attention, options), options, atol=2e-5)
