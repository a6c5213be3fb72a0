"""Host arrays of the rows' sampling settings; the rules of `runner.batches.batch` apply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sgljax_engine.runner.batches.batch import grow_buckets, pick_bucket
from sgljax_engine.sampling.allowed import AllowedBatch
from sgljax_engine.sampling.filters import KEEP_ALL, make_filters
from sgljax_engine.sampling.guide import ENDLESS, WORD_BITS
from sgljax_engine.sampling.logprobs import LogprobBatch
from sgljax_engine.sampling.masks import MaskBatch
from sgljax_engine.sampling.sampler import SamplingBatch
from sgljax_engine.sampling.table import SamplingTable
from sgljax_engine.sampling.token_counts import TokenCounts
from sgljax_engine.sampling_params import (
    MAX_SAMPLING_MASK,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKEN_IDS_LOGPROB,
    MAX_TOP_LOGPROBS,
    SAMPLING_MASK_SIZES,
    SamplingParams,
)
from sgljax_engine.types import Request

_LEAST_TEMPERATURE = 1e-30
"""Below it, logits that differ at all are infinitely far apart already."""

TOP_BUCKETS = (0, 8, 32, MAX_TOP_LOGPROBS)
TOKEN_ID_BUCKETS = (0, 8, 64, MAX_TOKEN_IDS_LOGPROB)


def table_buckets(vocab_size: int) -> tuple[int, ...]:
    """Widths of the sampling table's lists: 64 times powers of four, then the vocabulary."""
    return grow_buckets(64, 4, vocab_size)


def build_sampling_batch(requests: Sequence[Request], size: int) -> SamplingBatch:
    temperature = np.zeros(size)
    top_k = np.full(size, KEEP_ALL)
    top_p = np.ones(size)
    min_p = np.zeros(size)
    seed = np.zeros((size, 2), np.uint32)
    step = np.zeros(size, np.int32)
    stop_ids = np.full((size, MAX_STOP_TOKEN_IDS), -1, np.int32)
    used, params = slice(len(requests)), [request.params for request in requests]
    temperature[used] = [_temperature(p.temperature) for p in params]
    top_k[used] = [_top_k(p) for p in params]
    top_p[used] = [p.top_p for p in params]
    min_p[used] = [p.min_p for p in params]
    seeds = np.asarray([request.seed for request in requests], np.uint64)
    seed[used, 0], seed[used, 1] = seeds >> 32, seeds & 0xFFFFFFFF
    step[used] = [len(request.output_ids) for request in requests]
    # There are few distinct lists, mostly one: each is written once.
    lists: dict[tuple[int, ...], int] = {}
    which = [lists.setdefault(request.stop_ids, len(lists)) for request in requests]
    padded = np.full((len(lists), MAX_STOP_TOKEN_IDS), -1, np.int32)
    for i, ids in enumerate(lists):
        padded[i, : len(ids)] = ids
    if requests:
        stop_ids[used] = padded[which]
    filters = make_filters(temperature, top_k, top_p, min_p)
    return SamplingBatch(temperature.astype(np.float32), filters, seed, step, stop_ids)  # type: ignore[arg-type]


def _top_k(params: SamplingParams) -> int:
    top_k, most = params.top_k, KEEP_ALL
    if params.return_sampling_mask:
        most = MAX_SAMPLING_MASK
    return most if top_k is None or top_k <= 0 else min(top_k, most)


def _temperature(temperature: float) -> float:
    """A temperature whose float32 is a normal number; a smaller one has the same distribution."""
    return temperature if temperature == 0.0 else max(temperature, _LEAST_TEMPERATURE)


def build_table(
    requests: Sequence[Request], size: int, vocab_size: int, num_steps: int
) -> SamplingTable | None:
    """The settings that change logits; None when no row has any.

    The lists are as wide as the widest row needs, with room for `num_steps` more tokens.
    """
    if not any(_changes_next_logits(request) for request in requests):
        return None
    seen = [_seen_tokens(request) for request in requests]
    width = 0
    for request, tokens in zip(requests, seen, strict=True):
        num_edits = 0 if request.edits is None else len(request.edits.token_ids)
        num_seen = 0 if tokens is None else min(len(tokens) + num_steps, vocab_size)
        width = max(width, num_edits, num_seen)
    table: Any = empty_table(size, pick_bucket(table_buckets(vocab_size), width), vocab_size)
    for row, (request, tokens) in enumerate(zip(requests, seen, strict=True)):
        params = request.params
        table.min_new_tokens[row] = params.min_new_tokens
        table.repetition[row] = params.repetition_penalty
        table.frequency[row] = params.frequency_penalty
        table.presence[row] = params.presence_penalty
        if tokens is not None:
            table.seen_ids[row, : len(tokens)] = tokens.ids
            table.seen_counts[row, : len(tokens)] = tokens.counts
            table.num_seen[row] = len(tokens)
        if request.edits is not None:
            num_edits = len(request.edits.token_ids)
            table.edit_ids[row, :num_edits] = request.edits.token_ids
            table.edit_values[row, :num_edits] = request.edits.values
            table.allow_only[row] = request.edits.is_allow_list
    return table


def _changes_next_logits(request: Request) -> bool:
    """Whether settings change the request's logits from now on; min_new_tokens is passed once."""
    params = request.params
    is_early = len(request.output_ids) < params.min_new_tokens
    return request.edits is not None or is_early or params.has_penalties


def empty_table(size: int, width: int, vocab_size: int) -> SamplingTable:
    arrays: dict[str, Any] = {
        "edit_ids": np.full((size, width), vocab_size, np.int32),
        "edit_values": np.zeros((size, width), np.float32),
        "allow_only": np.zeros(size, bool),
        "min_new_tokens": np.zeros(size, np.int32),
        "repetition": np.ones(size, np.float32),
        "frequency": np.zeros(size, np.float32),
        "presence": np.zeros(size, np.float32),
        "seen_ids": np.full((size, width), vocab_size, np.int32),
        "seen_counts": np.zeros((size, width), np.int32),
        "num_seen": np.zeros(size, np.int32),
    }
    return SamplingTable(**arrays)


def _seen_tokens(request: Request) -> TokenCounts | None:
    """The updated tokens that penalties apply to; None without penalties."""
    if not request.params.has_penalties:
        return None
    if request.seen is None:
        request.seen = TokenCounts(request.prompt_ids)
    request.seen.update(request.output_ids)
    return request.seen


def build_logprob_batch(
    requests: Sequence[Request], size: int, vocab_size: int
) -> LogprobBatch | None:
    if not any(request.logprob_options.has_extras for request in requests):
        return None
    num_top = max(request.logprob_options.top_num for request in requests)
    num_ids = max(len(request.logprob_options.token_ids) for request in requests)
    token_ids = np.zeros((size, pick_bucket(TOKEN_ID_BUCKETS, num_ids)), np.int32)
    for row, request in enumerate(requests):
        ids = request.logprob_options.token_ids
        token_ids[row, : len(ids)] = ids
    num_ranks = min(pick_bucket(TOP_BUCKETS, num_top), vocab_size)
    return LogprobBatch(token_ids, np.zeros(num_ranks, np.int32))  # type: ignore[arg-type]


def build_mask_batch(requests: Sequence[Request], size: int) -> MaskBatch | None:
    """Rows that report their sampling masks; None when no row does.

    How many tokens a row's mask holds depends on its own top_k alone, not on the batch.
    """
    if not any(request.params.return_sampling_mask for request in requests):
        return None
    most = np.full(size, KEEP_ALL, np.int32)
    for row, request in enumerate(requests):
        if request.params.return_sampling_mask:
            most[row] = request.params.sampling_mask_size
    return mask_batch(most)


def mask_batch(most: np.ndarray) -> MaskBatch:
    """The batch of rows whose masks hold `most` [B] int32 tokens each."""
    width = int(np.max(most, where=most < KEEP_ALL, initial=SAMPLING_MASK_SIZES[0]))
    return MaskBatch(most, np.zeros(width, np.int32))  # type: ignore[arg-type]


def build_allowed_batch(
    requests: Sequence[Request], size: int, vocab_size: int, row_tokens: int
) -> AllowedBatch | None:
    """What grammars allow, for each of `row_tokens` tokens of a step; None without grammars."""
    guided = [row for row, request in enumerate(requests) if request.guide is not None]
    if not guided:
        return None
    count = pick_bucket(guided_buckets(size), len(guided))
    batch = allowed_batch(count, size, vocab_size, row_tokens)
    for place, row in enumerate(guided):
        guide = requests[row].guide
        assert guide is not None
        num_tokens = min(len(guide.allowed.words), row_tokens)
        batch.rows[place] = row
        batch.words[place, :num_tokens] = guide.allowed.words[:num_tokens]
        batch.num_steps[row] = guide.allowed.num_steps
    return batch


def guided_buckets(size: int) -> tuple[int, ...]:
    """Numbers of rows with a grammar in a batch."""
    return grow_buckets(8, 8, size)


def allowed_batch(count: int, size: int, vocab_size: int, row_tokens: int) -> AllowedBatch:
    """Room for `count` rows with a grammar, all of which may generate any token."""
    rows: Any = np.full(count, size, np.int32)
    words: Any = np.full((count, row_tokens, -(-vocab_size // WORD_BITS)), 0xFFFFFFFF, np.uint32)
    num_steps: Any = np.full(size, ENDLESS, np.int32)
    return AllowedBatch(rows, words, num_steps)
