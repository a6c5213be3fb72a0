"""What the rollouts of killed_rollouts.py generate."""

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
