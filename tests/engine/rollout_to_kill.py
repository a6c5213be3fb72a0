"""What the rollouts of killed_rollouts.py generate, one token of each request at a time."""

from __future__ import annotations

from typing import Any

from tests.engine.models import random_prompts

NUM_REQUESTS, NUM_LONG = 24, 6
PROMPTS = random_prompts(NUM_REQUESTS, 3, 50)
PARAMS: list[dict[str, Any]] = [
    {
        "temperature": 0.0 if i % 3 else 0.9,
        "seed": None if i % 3 else i,
        # The last ones go on for long after the others.
        "max_new_tokens": 10 + 5 * i + 70 * (i >= NUM_REQUESTS - NUM_LONG),
        "ignore_eos": True,
    }
    for i in range(NUM_REQUESTS)
]
RIDS = [f"r{i}" for i in range(NUM_REQUESTS)]
OPTIONS: dict[str, Any] = {
    "page_size": 4,
    "max_running_requests": 8,
    "batch_buckets": (8,),
    "chunked_prefill_size": 64,
    "token_buckets": (64,),
    "decode_steps": 1,
}
