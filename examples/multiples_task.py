"""The repeated-addition task: an addition whose worked solutions have long-tailed lengths.

The policy is asked `Q: 3+7*04= A:` and adds 7 to 3 four times, counting down, before it writes
the sum: `04:010,03:017,02:024,01:031,031`. Only the sum is rewarded. The number of additions is
drawn from a lognormal distribution, so that most solutions are short and a few are many times as
long, as the answers of reasoning models are; every token of a long one is needed for its answer.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import grain
import numpy as np
from tunix.models.qwen3 import model as qwen3

from addition_task import Tokenizer, batches_of

MAX_PROMPT_LENGTH = 16
MAX_NEW_TOKENS = 176
MAX_COUNT = 24
MEDIAN_COUNT = 4.0
SIGMA = 0.9  # of the logarithm of the count

_PROMPT = re.compile(r"Q: (\d)\+(\d)\*(\d\d)= A:")


class Multiple(NamedTuple):
    """`step` is to be added to `start`, `times` times."""

    start: int
    step: int
    times: int

    @property
    def prompt(self) -> str:
        """What the policy is asked."""
        return f"Q: {self.start}+{self.step}*{self.times:02}= A:"

    @property
    def answer(self) -> str:
        """The sum, in three digits."""
        return f"{self.start + self.step * self.times:03}"

    @property
    def scratchpad(self) -> str:
        """Each addition: how many are left, and the sum so far."""
        sums = (self.start + self.step * done for done in range(1, self.times + 1))
        return ",".join(f"{self.times - i:02}:{total:03}" for i, total in enumerate(sums))

    @property
    def solution(self) -> str:
        """A perfect completion."""
        return f"{self.scratchpad},{self.answer}"

    @classmethod
    def parse(cls, prompt: str) -> Multiple:
        """Returns the problem that `prompt` asks.

        Raises:
            ValueError: It is not a prompt of this task.
        """
        match = _PROMPT.fullmatch(prompt)
        if match is None:
            raise ValueError(f"not a prompt of the repeated-addition task: {prompt!r}")
        return cls(*map(int, match.groups()))


def sample_problem(rng: np.random.Generator) -> Multiple:
    """Returns a problem; its count is lognormal, rounded, from 1 to `MAX_COUNT`."""
    count = round(rng.lognormal(np.log(MEDIAN_COUNT), SIGMA))
    start, step = rng.integers(10), rng.integers(1, 10)
    return Multiple(int(start), int(step), min(max(count, 1), MAX_COUNT))


def problem_batches(num_batches: int, batch_size: int, seed: int) -> grain.MapDataset:
    """Returns batches for Tunix's learners: arrays of `prompts` and of each one's `answer`."""
    return batches_of(sample_problem, num_batches, batch_size, seed)


def model_config() -> qwen3.ModelConfig:
    """Returns the policy's shape: a Qwen3 of 0.6 million parameters."""
    return qwen3.ModelConfig(
        num_layers=4,
        vocab_size=Tokenizer.vocab_size,
        embed_dim=128,
        hidden_dim=256,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        norm_eps=1e-6,
        rope_theta=1_000_000,
        use_tied_embedding=True,
    )
