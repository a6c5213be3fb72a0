"""The sizes that test engines are compiled for: three sets of options, used everywhere.

Compiling is most of what the tests cost, and programs are kept per shape: engines of one geometry
and one model share them, across modules, processes and runs. Programs depend on the buckets, the
page size, the number of pages, `decode_steps` and the longest request. All else differs for free:
policies, limits of requests, and what `within` changes.

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
    "max_model_len",
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
"""Prompts come in chunks: one dispatch prefills one request. Pages run out, and requests wait."""

RETRACTING: Mapping[str, Any] = {
    **CHUNKED,
    "init_new_token_ratio": 0.0,
    "min_new_token_ratio": 0.0,
}
"""Programs of `CHUNKED`. Requests start without room for their answers, and are retracted too."""

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
        changes: Options among `NAMES`.
    """
    assert len(reason) > 10, reason
    assert changes.keys() <= {*NAMES}, changes
    return {**base, **changes}


def within(base: Mapping[str, Any], **limits: int) -> dict[str, Any]:
    """A geometry with smaller limits, which has the programs of `base`.

    Args:
        base: A geometry.
        limits: `max_running_requests` and `chunked_prefill_size`, up to the largest buckets.
    """
    buckets = {"max_running_requests": "batch_buckets", "chunked_prefill_size": "token_buckets"}
    for name, limit in limits.items():
        assert 1 <= limit <= max(base[buckets[name]]), (name, limit)
    # Else there are fewer pages for fewer requests.
    assert "max_running_requests" not in limits or "num_kv_tokens" in base, limits
    return {**base, **limits}
