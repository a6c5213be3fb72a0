"""Attention over keys that rows share on TPUs: each run of rows is a block of queries.

Runs are as of `kernels.runs`, rows as of `paged_attention`, which goes on from what this returns.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from sgljax_engine.kernels.runs import SharedRuns
from sgljax_engine.kernels.tpu.chunk_softmax import MASKED
from sgljax_engine.kernels.tpu.paged_attention import KeysBefore, paged_attention
from sgljax_engine.kernels.tpu.paged_sizes import Scores


def shared_attention(
    q_BDh: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table_BP: jax.Array,
    kv_lens_B: jax.Array,
    runs: SharedRuns,
    scores: Scores,
    sinks: jax.Array | None = None,
    *,
    interpret: Any = False,
) -> KeysBefore:
    """Attends to the keys that rows share, and to the sinks, of rows without a run too."""
    members = runs.members
    leaders = jnp.minimum(members[:, 0], len(kv_lens_B) - 1)
    # Rows that have all ended need nothing.
    is_used = jnp.any(kv_lens_B.at[members].get(mode="fill", fill_value=0) > 0, axis=1)
    num_keys = jnp.where(is_used, runs.num_keys, 0)
    found = paged_attention(
        q_BDh.at[members].get(mode="fill", fill_value=0),
        None,
        *(k_pages, v_pages, page_table_BP[leaders]),
        num_keys,  # positions behind all keys
        num_keys,
        scores,
        has_lse=True,
        interpret=interpret,
    )
    assert found.lse is not None
    lse_of, out_of = (x.reshape(-1, *x.shape[2:]) for x in (found.lse, found.out))
    lses = lse_of.at[runs.places].get(mode="fill", fill_value=MASKED)
    outs = out_of.at[runs.places].get(mode="fill", fill_value=0.0)
    if sinks is not None:
        both = jnp.logaddexp(lses, sinks)
        lses, outs = both, outs * jnp.exp(lses - both)[..., None]
    return KeysBefore(runs.begins, lses, outs)
