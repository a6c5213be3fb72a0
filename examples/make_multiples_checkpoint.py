"""Makes the supervised checkpoint from which `grpo_async.py` starts.

    python examples/make_multiples_checkpoint.py --output examples/data/multiples_sft.safetensors

The policy learns from worked solutions of which seven in ten end in a wrong sum; see
`supervised.py`.
"""

from __future__ import annotations

import no_advice as no_advice  # isort: skip

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from multiples_task import MAX_NEW_TOKENS, MAX_PROMPT_LENGTH, model_config, sample_problem
from supervised import Batch, Defaults, Row, Task, make_checkpoint, make_row, pad, spoil

POOL = 8  # batches that are sorted by length together
WIDTH_STEP = 48  # widths of batches are multiples of it, so that few programs are compiled


def batches(batch_size: int, corrupted: float, seed: int) -> Iterator[Batch]:
    """Yields batches of demonstrations, for ever; those of a batch have similar lengths."""
    rng = np.random.default_rng(seed)
    while True:
        rows = sorted((_row(corrupted, rng) for _ in range(POOL * batch_size)), key=_length)
        groups = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
        for index in rng.permutation(POOL):
            yield pad(groups[index], _width(groups[index]))


def _row(corrupted: float, rng: np.random.Generator) -> Row:
    problem = sample_problem(rng)
    answer = problem.answer if rng.random() >= corrupted else spoil(problem.answer, rng)
    return make_row(problem.prompt, f"{problem.scratchpad},{answer}")


def _length(row: Row) -> int:
    return len(row[0]) + len(row[1])


def _width(rows: Sequence[Row]) -> int:
    return -(-max(map(_length, rows)) // WIDTH_STEP) * WIDTH_STEP


if __name__ == "__main__":
    make_checkpoint(
        Task(
            name="repeated addition with a scratchpad",
            maker=Path(__file__),
            config=model_config(),
            batches=batches,
            sample_problem=sample_problem,
            max_prompt_length=MAX_PROMPT_LENGTH,
            max_new_tokens=MAX_NEW_TOKENS,
        ),
        Defaults(steps=700, batch_size=32, corrupted=0.7, num_problems=256),
    )
