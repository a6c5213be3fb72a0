"""Sizes of the batches that an engine's programs are compiled for, and their defaults."""

from __future__ import annotations

from typing import NamedTuple

from sgljax_engine.runner.batches.batch import grow_buckets
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


def default_batch_buckets(max_running: int, platform: str) -> tuple[int, ...]:
    """Decode batch sizes, ascending, up to `max_running`.

    On accelerators they are powers of four: padding rows attend to nothing, and all rows share one
    read of the weights. A CPU soon spends most of a step on rows, padding included, so its sizes
    double from 4 on, with one half-way between from 64 on.
    """
    if platform != "cpu":
        return grow_buckets(1, 4, max_running)
    doubled = grow_buckets(4, 2, max_running)
    between = (size * 3 // 2 for size in doubled[:-1] if size >= 64)
    sizes = {1, *doubled, *between}
    return tuple(sorted(size for size in sizes if size <= max_running))


def prefill_pass(platform: str) -> int | None:
    """Number of tokens that prefill takes through the layers in one pass; None for a whole bucket.

    A few tokens keep a CPU busy; an accelerator needs as many as possible.
    """
    return 256 if platform == "cpu" else None


def max_step_tokens(platform: str) -> int:
    """Most tokens of a decode step with drafts.

    Where they would cost as much as reading the weights, on accelerators; on a CPU, where they cost
    several times as much even for large weights.
    """
    return 64 if platform == "cpu" else 256


def default_token_buckets(max_tokens: int, per_pass: int | None) -> tuple[int, ...]:
    """Buckets up to `max_tokens`: a quarter of a pass and whole passes; else powers of two."""
    if per_pass is None:
        return grow_buckets(256, 2, max_tokens)
    whole = -(-max_tokens // per_pass) * per_pass
    return (per_pass // 4, whole) if max_tokens > per_pass // 4 else (max_tokens,)
