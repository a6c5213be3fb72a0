"""Makes the supervised checkpoint from which `grpo_addition.py` starts.

    python examples/make_addition_checkpoint.py --output examples/data/addition_sft.safetensors

The policy learns from worked additions of which three in four end in a wrong sum; see
`supervised.py`.
"""

from __future__ import annotations

import no_advice as no_advice  # isort: skip

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from addition_task import (
    MAX_NEW_TOKENS,
    MAX_PROMPT_LENGTH,
    Problem,
    model_config,
    sample_problem,
)
from supervised import Batch, Defaults, Task, make_checkpoint, make_row, pad, spoil

LENGTH = 48  # of a demonstration with its prompt and special tokens


def demonstration(problem: Problem, corrupted: float, rng: np.random.Generator) -> str:
    """Returns a worked addition; a share of `corrupted` of them end in a wrong sum."""
    answer = problem.answer if rng.random() >= corrupted else spoil(problem.answer, rng)
    return f"{problem.scratchpad},{answer}"


def batches(batch_size: int, corrupted: float, seed: int) -> Iterator[Batch]:
    """Yields batches of demonstrations, for ever."""
    rng = np.random.default_rng(seed)
    while True:
        problems = (sample_problem(rng) for _ in range(batch_size))
        rows = [make_row(p.prompt, demonstration(p, corrupted, rng)) for p in problems]
        yield pad(rows, LENGTH)


if __name__ == "__main__":
    make_checkpoint(
        Task(
            name="addition with a scratchpad",
            maker=Path(__file__),
            config=model_config(),
            batches=batches,
            sample_problem=sample_problem,
            max_prompt_length=MAX_PROMPT_LENGTH,
            max_new_tokens=MAX_NEW_TOKENS,
        ),
        Defaults(steps=400, batch_size=128, corrupted=0.75, num_problems=512),
    )
