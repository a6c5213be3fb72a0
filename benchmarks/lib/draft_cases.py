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

SHORT_TOKENS = 8
"""An answer that is shorter than the drafts of a step."""

LONG_TOKENS = 1024
"""Tokens that follow where an answer is much shorter than its draft."""

Prompts = list[list[int]]


class Case(NamedTuple):
    """Requests, and what the history says about them.

    Attributes:
        name: For the table.
        prompts: Token ids.
        params: Of each prompt.
        drafts: int32, an earlier answer to each prompt.
        forgets: Whether the engine forgets what it learnt before each run, not just the first.
    """

    name: str
    prompts: Prompts
    params: list[SamplingParams]
    drafts: list[np.ndarray]
    forgets: bool = False


class Requests(NamedTuple):
    """What cases are made from: a request for each row.

    Attributes:
        vocab_size: Ids are below.
        num_tokens: Tokens of an answer.
        prompts: Token ids.
        params: Of each prompt.
        answers: int32, what the model says, and as much as a step drafts of what it would say
            behind the limit.
        rng: Of the draws.
    """

    vocab_size: int
    num_tokens: int
    prompts: Prompts
    params: list[SamplingParams]
    answers: list[np.ndarray]
    rng: np.random.Generator


def make_requests(engine: Engine, num_rows: int, num_tokens: int) -> Requests:
    """Asks an engine without drafts for the true answers."""
    rng, vocab_size = np.random.default_rng(0), engine.model_config.vocab_size
    prompts = _random_prompts(rng, num_rows, vocab_size)
    params = _sampling(num_rows, num_tokens)
    answers = _answers(engine, prompts, _sampling(num_rows, num_tokens + DRAFT_TOKENS))
    return Requests(vocab_size, num_tokens, prompts, params, answers, rng)


def made_up_cases(requests: Requests) -> list[Case]:
    """Drafts that are right some of the time."""
    answers = [ids[: requests.num_tokens] for ids in requests.answers]
    return [
        Case(
            f"{share} % right",
            requests.prompts,
            requests.params,
            some_right(answers, share / 100, requests.vocab_size, requests.rng),
        )
        for share in SHARES
    ]


def adversarial_cases(engine: Engine, requests: Requests) -> list[Case]:
    """Drafts that do their worst.

    Args:
        engine: Without drafts, for more true answers.
        requests: For all rows.
    """
    prompts, params, right = requests.prompts, requests.params, requests.answers
    wrong = some_right(right, 0.0, requests.vocab_size, requests.rng)
    foreign = [answer + requests.vocab_size for answer in right]
    stop_at = 3 * requests.num_tokens // 4
    stopping = [
        dataclasses.replace(each, stop_token_ids=(int(answer[stop_at]),))
        for each, answer in zip(params, right, strict=True)
    ]
    return [
        Case("always wrong", prompts, params, wrong),
        Case("always wrong, in a new engine", prompts, params, wrong, forgets=True),
        _long_case(engine, requests),
        Case("beyond a stop token", prompts, stopping, right),
        Case("beyond max_new_tokens", prompts, params, right),
        Case("of another vocabulary", prompts, params, foreign),
    ]


def some_right(
    answers: Sequence[np.ndarray], share: float, vocab_size: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Answers of which each token is kept with a probability, and is another one if not."""
    return [
        np.where(rng.random(len(answer)) < share, answer, (answer + 1) % vocab_size)
        for answer in answers
    ]


def _long_case(engine: Engine, requests: Requests) -> Case:
    """As many tokens as in other cases, in short answers with drafts that do not end."""
    rng, vocab_size = requests.rng, requests.vocab_size
    count = len(requests.prompts) * max(requests.num_tokens // SHORT_TOKENS, 1)
    prompts = _random_prompts(rng, count, vocab_size)
    params = _sampling(count, SHORT_TOKENS)
    drafts = [
        np.concatenate([answer, rng.integers(1, vocab_size, LONG_TOKENS, np.int32)])
        for answer in _answers(engine, prompts, params)
    ]
    return Case(f"{LONG_TOKENS} behind answers of {SHORT_TOKENS}", prompts, params, drafts)


def _random_prompts(rng: np.random.Generator, count: int, vocab_size: int) -> Prompts:
    return rng.integers(1, vocab_size, (count, PROMPT_TOKENS)).tolist()


def _sampling(count: int, num_tokens: int) -> list[SamplingParams]:
    """For so many prompts; nothing but the limit ends them."""
    return [
        SamplingParams(temperature=1.0, seed=seed, max_new_tokens=num_tokens, ignore_eos=True)
        for seed in range(count)
    ]


def _answers(engine: Engine, prompts: Prompts, params: list[SamplingParams]) -> list[np.ndarray]:
    outputs = engine.generate_requests(prompts, params)
    return [np.asarray(output.output_ids, np.int32) for output in outputs]
