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
    q_NQDh: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table_NP: jax.Array,
    kv_lens_N: jax.Array,
    runs: SharedRuns,
    scores: Scores,
    sinks: jax.Array | None = None,
    *,
    interpret: Any = False,
) -> KeysBefore:
    """Attends to the keys that rows share, and to the sinks, of rows without a run too."""
    members, (num_queries,) = runs.members, runs.queries.shape
    leaders = jnp.minimum(members[:, 0], len(kv_lens_N) - 1)
    # Rows that have all ended need nothing.
    is_used = jnp.any(kv_lens_N.at[members].get(mode="fill", fill_value=0) > 0, axis=1)
    num_keys = jnp.where(is_used, runs.num_keys, 0)
    q = q_NQDh[:, :num_queries].at[members].get(mode="fill", fill_value=0)
    found = paged_attention(
        q.reshape(len(members), -1, *q.shape[3:]),
        None,
        *(k_pages, v_pages, page_table_NP[leaders]),
        num_keys,  # positions behind all keys
        num_keys,
        scores,
        has_lse=True,
        interpret=interpret,
    )
    assert found.lse is not None

    def of_blocks(x: jax.Array, fill: float) -> jax.Array:
        """[N, Q, ...], filled where blocks have no run and queries are not used."""
        x = x.reshape(members.size, num_queries, *x.shape[2:])
        x = x.at[runs.places].get(mode="fill", fill_value=fill)
        more = (0, q_NQDh.shape[1] - num_queries)
        return jnp.pad(x, ((0, 0), more, *[(0, 0)] * (x.ndim - 2)), constant_values=fill)

    lses, outs = of_blocks(found.lse, MASKED), of_blocks(found.out, 0.0)
    if sinks is not None:
        both = jnp.logaddexp(lses, sinks)
        lses, outs = both, outs * jnp.exp(lses - both)[..., None]
    return KeysBefore(runs.begins, lses, outs)
