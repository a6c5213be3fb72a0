"""Sizes of the batches that an engine's programs are compiled for."""

from __future__ import annotations

from typing import NamedTuple

from sgljax_engine.runner.batches.drafts import TextSizes


class BatchShapes(NamedTuple):
    """The sizes to which batches are padded.

    Attributes:
        batch_buckets: Decode batch sizes, ascending.
        token_buckets: Prefill sizes, ascending, multiples of `token_block`.
        token_block: Tokens in a prefill block.
        table_width: Pages of the longest request.
        text_sizes: Tokens that a row may draft from; None without speculation.
    """

    batch_buckets: tuple[int, ...]
    token_buckets: tuple[int, ...]
    token_block: int
    table_width: int
    text_sizes: TextSizes | None = None
