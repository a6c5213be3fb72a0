"""Requests with earlier answers that were made up, for the benchmark of draft tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sgljax_engine import Engine, SamplingParams

SHARES = (0, 30, 60, 90)
"""Per cent of the drafts that are right."""

PROMPT_TOKENS = 32

DRAFT_TOKENS = 15
"""Most drafts of a row in a step."""

Prompts = list[list[int]]


class Case(NamedTuple):
    """Requests, and what the history says about them.

    Attributes:
        name: For the table.
        prompts: Token ids.
        params: Of each prompt.
        drafts: int32, an earlier answer to each prompt.
    """

    name: str
    prompts: Prompts
    params: list[SamplingParams]
    drafts: list[np.ndarray]


def make_cases(engine: Engine, num_rows: int, num_tokens: int) -> list[Case]:
    """Drafts that are right some of the time, and drafts that are of no use.

    Args:
        engine: Without drafts, which says the true answers.
        num_rows: Requests, one for each row.
        num_tokens: Tokens of an answer.
    """
    rng, vocab_size = np.random.default_rng(0), engine.model_config.vocab_size
    prompts = rng.integers(1, vocab_size, (num_rows, PROMPT_TOKENS)).tolist()
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_new_tokens=num_tokens, ignore_eos=True)
        for seed in range(num_rows)
    ]
    longer = [
        dataclasses.replace(each, max_new_tokens=num_tokens + DRAFT_TOKENS) for each in params
    ]
    outputs = engine.generate_requests(prompts, longer)
    right = [np.asarray(output.output_ids, np.int32) for output in outputs]
    answers = [ids[:num_tokens] for ids in right]
    drafts = {
        f"{share} % right": some_right(answers, share / 100, vocab_size, rng) for share in SHARES
    }
    drafts["beyond max_new_tokens"] = right
    drafts["of another vocabulary"] = [answer + vocab_size for answer in right]
    return [Case(name, prompts, params, each) for name, each in drafts.items()]


def some_right(
    answers: Sequence[np.ndarray], share: float, vocab_size: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Answers of which each token is kept with a probability, and is another one if not."""
    return [
        np.where(rng.random(len(answer)) < share, answer, (answer + 1) % vocab_size)
        for answer in answers
    ]
