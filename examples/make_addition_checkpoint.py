"""Makes the supervised checkpoint from which `grpo_addition.py` starts.

    python examples/make_addition_checkpoint.py --output examples/data/addition_sft.safetensors

The policy learns from worked additions of which three in four end in a wrong sum; see
`supervised.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from addition_task import (
    MAX_NEW_TOKENS,
    MAX_PROMPT_LENGTH,
    Problem,
    Tokenizer,
    model_config,
    sample_problem,
)
from supervised import Batch, Defaults, Task, make_checkpoint, spoil

LENGTH = 48  # of a demonstration with its prompt and special tokens


def demonstration(problem: Problem, corrupted: float, rng: np.random.Generator) -> str:
    """Returns a worked addition; a share of `corrupted` of them end in a wrong sum."""
    answer = problem.answer if rng.random() >= corrupted else spoil(problem.answer, rng)
    return f"{problem.scratchpad},{answer}"


def batches(batch_size: int, corrupted: float, seed: int) -> Iterator[Batch]:
    """Yields batches of demonstrations, for ever."""
    tokenizer = Tokenizer()
    rng = np.random.default_rng(seed)
    while True:
        tokens = np.full((batch_size, LENGTH), tokenizer.pad_id(), np.int32)
        is_target = np.zeros((batch_size, LENGTH), np.bool_)
        for row in range(batch_size):
            problem = sample_problem(rng)
            prompt = [tokenizer.bos_id(), *tokenizer.encode(problem.prompt)]
            completion = tokenizer.encode(demonstration(problem, corrupted, rng))
            ids = [*prompt, *completion, tokenizer.eos_id()]
            tokens[row, : len(ids)] = ids
            is_target[row, len(prompt) : len(ids)] = True
        yield Batch(tokens, is_target)


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
