"""Sizes of the batches that an engine's programs are compiled for."""

from __future__ import annotations

from typing import NamedTuple

from sgljax_engine.runner.batches.drafts import TextSizes


class BatchShapes(NamedTuple):
    """The sizes to which batches are padded; buckets ascend.

    Token buckets are multiples of `token_block`, the tokens in a prefill block. `table_width`
    counts the pages of the longest request, `text_sizes` the tokens that a row may draft from.
    """

    batch_buckets: tuple[int, ...]
    token_buckets: tuple[int, ...]
    token_block: int
    table_width: int
    text_sizes: TextSizes | None = None
