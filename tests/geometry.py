"""The sizes that test engines are compiled for: three sets of options, used everywhere.

Compiling is most of what the tests cost, and programs are kept per shape: engines of one geometry
and one model share them, across modules, processes and runs. Programs depend on the buckets, the
page size, the number of pages, `decode_steps` and the longest request. All else differs for free:
`max_running_requests` up to the bucket (with `num_kv_tokens` given), `chunked_prefill_size` up to
the bucket, policies and limits of requests.

Another geometry says why: `other("pages of one token", page_size=1)`. `tests/test_structure.py`
counts those.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = (
    "page_size",
    "num_kv_tokens",
    "max_running_requests",
    "batch_buckets",
    "chunked_prefill_size",
    "token_buckets",
    "decode_steps",
)
"""Options that make up a geometry."""

SMALL: Mapping[str, Any] = {
    "page_size": 4,
    "max_running_requests": 8,
    "batch_buckets": (8,),
    "chunked_prefill_size": 64,
    "token_buckets": (64,),
    "decode_steps": 4,
}
"""A few requests with pages for all of them: what a test takes that cares for none of this."""

CHUNKED: Mapping[str, Any] = {
    "page_size": 4,
    "num_kv_tokens": 160,
    "max_running_requests": 8,
    "batch_buckets": (8,),
    "chunked_prefill_size": 16,
    "token_buckets": (16,),
    "decode_steps": 4,
}
"""Prompts come in chunks, and pages run out: requests wait, are retracted and prefilled again."""

WIDE: Mapping[str, Any] = {
    "page_size": 16,
    "max_running_requests": 64,
    "batch_buckets": (64,),
    "chunked_prefill_size": 256,
    "token_buckets": (256,),
    "decode_steps": 16,
}
"""A crowd, many steps a dispatch, and prompts that are prefilled together."""


def other(reason: str, base: Mapping[str, Any] = SMALL, **changes: Any) -> dict[str, Any]:
    """Another geometry: `base` with changes, which cost programs of their own.

    Args:
        reason: Why none of the three will do, for whoever reads the test.
        base: What it is otherwise.
        changes: Options among `NAMES`, and `max_model_len`.
    """
    assert len(reason) > 10, reason
    assert changes.keys() <= {*NAMES, "max_model_len"}, changes
    return {**base, **changes}
