"""Prefill batches: what a dispatch's chunks become, program by program."""

from __future__ import annotations

import numpy as np
import pytest

from sgljax_engine.runner.batches.batch import (
    NO_SLOT,
    build_prefill_batches,
    pick_bucket,
    prefill_parts,
    prefill_sizes,
)
from sgljax_engine.sampling_params import SamplingParams
from sgljax_engine.types import PrefillChunk, Request


@pytest.mark.parametrize(
    ("num_tokens", "parts"),
    [
        (16, [(16, 64)]),
        (64, [(64, 64)]),
        (80, [(64, 64), (16, 64)]),
        (192, [(64, 64)] * 3),
        (208, [(208, 1024)]),
        (256, [(256, 1024)]),
        (272, [(256, 1024), (16, 64)]),
        (1024, [(1024, 1024)]),
    ],
)
def test_what_is_left_of_a_pass_goes_through_the_smallest(num_tokens, parts):
    assert prefill_parts(num_tokens, (64, 1024), 256) == parts
    sizes = prefill_sizes((64, 1024), 256)
    cost = sum(64 if bucket == 64 else -(-count // 256) * 256 for count, bucket in parts)
    assert cost == next(size for size in sizes if size >= num_tokens)


@pytest.mark.parametrize(
    ("buckets", "per_pass"), [((64, 1024), None), ((48, 1024), 256), ((512, 1024), 256)]
)
def test_other_buckets_take_all_at_once(buckets, per_pass):
    assert prefill_parts(300, buckets, per_pass) == [(300, pick_bucket(buckets, 300))]


def test_parts_are_what_was_packed():
    """Every block is in one part, with the pages and the keys that it may see."""
    rng = np.random.default_rng(0)
    chunks = []
    for start, num_tokens in ((0, 100), (30, 1), (16, 230)):
        pages = rng.permutation(64)[: -(-(start + num_tokens) // 8)].tolist()
        ids = rng.integers(1, 99, start + num_tokens).tolist()
        request = Request(rid=str(start), prompt_ids=ids, params=SamplingParams(), seed=0)
        chunks.append(PrefillChunk(request, start, num_tokens, tuple(pages)))
    batches = build_prefill_batches(
        chunks, buckets=(64, 512), per_pass=256, block=16, page_size=8, table_width=40
    )
    assert [len(batch.input_ids) for batch in batches] == [512, 64, 64]
    written = []
    for batch in batches:
        for token, slot in enumerate(batch.slot_mapping.tolist()):
            if slot != NO_SLOT:
                row = token // 16
                position = int(batch.positions[token])
                assert batch.page_table[row, position // 8] * 8 + position % 8 == slot
                assert position < batch.seq_lens[row]
                written.append((slot, int(batch.input_ids[token]), position))
    expected = [
        (chunk.pages[at // 8] * 8 + at % 8, chunk.request.prompt_ids[at], at)
        for chunk in chunks
        for at in range(chunk.start, chunk.start + chunk.num_tokens)
    ]
    assert written == expected
