"""Memory of a step of the kernel in `paged_attention`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from sgljax_engine.kernels.tpu.paged_sizes import Scores, Sizes


class Run(NamedTuple):
    """Blocks that follow each other in one request.

    The last block's page table has all its keys. `start` is the position of its first token;
    `kv_len` counts its own keys too. `page` and `chunk` are the first that it needs: older ones
    have left the window, or were attended to before. `end_chunk` is the one after its last; `chunk`
    for an unused block.
    """

    first: Any
    last: Any
    start: Any
    kv_len: Any
    page: Any
    chunk: Any
    end_chunk: Any


class Step(NamedTuple):
    """The references of a step.

    table_ref: [N, P] page table. starts_ref: [N] first positions. lens_ref: [N] numbers of keys.
    runs_ref: [N] blocks of the run that each block starts. begins_ref: [N] first keys that a block
    need not attend to, whole pages; None without. `pools` are pages, buffer for two
    chunks, and the new ones or None, of keys and of values. `state` is the maximum and sum of the
    scores, and weighted sum of the values, of each query. `next_ref`: which half of the buffers the
    next run's first chunk is for, and whether its copies have started; `load_sems` has one for each
    half.
    """

    table_ref: Any
    starts_ref: Any
    lens_ref: Any
    runs_ref: Any
    begins_ref: Any
    q_ref: Any
    out_ref: Any
    pools: tuple[tuple[Any, Any, Any], ...]
    state: tuple[Any, Any, Any]
    next_ref: Any
    load_sems: Any
    store_sems: Any
    first_block: Any
    num_blocks: Any
    sizes: Sizes
    scores: Scores

    @classmethod
    def of(
        cls,
        named: Mapping[str, Any],
        first_block: Any,
        num_blocks: Any,
        sizes: Sizes,
        scores: Scores,
    ) -> Step:
        """The references by the names that `paged_attention` gives them."""
        is_writing = "new_k" in named  # the pools come in and go out, in the same memory
        k_ref, v_ref = (named[f"stored_{x}" if is_writing else f"{x}_pages"] for x in "kv")
        return cls(
            table_ref=named["table"],
            starts_ref=named["starts"],
            lens_ref=named["lens"],
            runs_ref=named["runs"],
            begins_ref=named.get("begins"),
            q_ref=named["q"],
            out_ref=named["out"],
            pools=(
                (k_ref, named["k_chunks"], named.get("new_k")),
                (v_ref, named["v_chunks"], named.get("new_v")),
            ),
            state=(named["max"], named["sum"], named["acc"]),
            next_ref=named["next"],
            load_sems=named["load_sems"],
            store_sems=named["store_sems"],
            first_block=first_block,
            num_blocks=num_blocks,
            sizes=sizes,
            scores=scores,
        )

    @property
    def is_writing(self) -> bool:
        return self.pools[0][2] is not None

    def run_from(self, first: Any) -> Run:
        """The run that a block starts."""
        last = first + self.runs_ref[first] - 1
        start, kv_len = self.starts_ref[first], self.lens_ref[last]
        end = (kv_len + self.sizes.chunk_tokens - 1) // self.sizes.chunk_tokens
        page = self.first_page(start)
        if self.begins_ref is not None:
            page = jnp.maximum(page, self.begins_ref[first] // self.sizes.page_size)
        chunk = jnp.minimum(page // self.sizes.chunk_pages, end)
        return Run(first, last, start, kv_len, page, chunk, end)

    def first_page(self, start: Any) -> Any:
        """The first page that a query at `start` sees."""
        if self.scores.sliding_window is None:
            return jnp.int32(0)
        oldest = jnp.maximum(start - self.scores.sliding_window + 1, 0)
        return oldest // self.sizes.page_size

    def place_of(self, head: int, group: int, tokens: Any) -> Any:
        """Position of the queries and outputs of a kv head's group."""
        _, num_groups, _, head_dim = self.state[2].shape
        if self.sizes.num_queries == 1:
            return 0, head
        return 0, tokens, pl.ds((head * num_groups + group) * head_dim, head_dim)

    def tokens_before(self, block: Any) -> Any:
        """Tokens of the step before a block of it."""
        num_tokens = (block - self.first_block) * self.sizes.num_queries
        return pl.multiple_of(num_tokens, self.sizes.num_queries)
