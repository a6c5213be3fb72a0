"""Workloads of the benchmarks: prompts, and the number of tokens for each request."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

FIRST_TOKEN_ID = 1
"""Prompts hold no token below this: 0 is the pad token of every peer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests that are all submitted at once.

    Attributes:
        name: Name for results.
        prompts: Distinct prompts, token ids.
        num_samples: Requests of each prompt; request i samples prompt `i // num_samples`.
        output_lengths: Exact number of tokens that each request asks for.
        num_rows: Maximum number of requests that the engine decodes together.
    """

    name: str
    prompts: tuple[tuple[int, ...], ...]
    num_samples: int
    output_lengths: tuple[int, ...]
    num_rows: int

    def __post_init__(self) -> None:
        """Raises ValueError when lengths and requests do not match."""
        wanted = len(self.prompts) * self.num_samples
        if len(self.output_lengths) != wanted:
            raise ValueError(
                f"output_lengths must hold {wanted} entries (prompts x num_samples), "
                f"got {len(self.output_lengths)}"
            )

    @property
    def requests(self) -> list[list[int]]:
        """The prompt of every request."""
        return [list(prompt) for prompt in self.prompts for _ in range(self.num_samples)]

    @property
    def useful_tokens(self) -> int:
        """Tokens that requests asked for: the only ones that count."""
        return sum(self.output_lengths)

    @property
    def max_prompt_len(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt) for prompt in self.prompts)

    @property
    def max_output_len(self) -> int:
        """Tokens of the longest output."""
        return max(self.output_lengths)

    @property
    def max_model_len(self) -> int:
        """Number of positions that a peer must have room for."""
        return self.max_prompt_len + self.max_output_len

    def with_lengths(self, output_lengths: Sequence[int]) -> Workload:
        """The same prompts with other output lengths."""
        return dataclasses.replace(self, output_lengths=tuple(output_lengths))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the workloads. All are counts of tokens, except prompts, samples and rows."""

    num_prompts: int = 16
    num_samples: int = 8
    prompt_low: int = 64
    prompt_high: int = 128
    output_low: int = 16
    output_high: int = 256
    uniform_output: int = 128
    uniform_rows: int = 64
    long_prompt: int = 2048
    long_output: int = 64

    def scaled(self, factor: float) -> Sizes:
        """Sizes with all lengths times a factor, at least 1."""
        names = ("prompt_low", "prompt_high", "output_low", "output_high", "uniform_output")
        names += ("long_prompt", "long_output")
        changes = {name: max(round(getattr(self, name) * factor), 1) for name in names}
        return dataclasses.replace(self, **changes)


FULL = Sizes()
"""Sizes of the reported tables."""

QUICK = Sizes(
    num_prompts=2,
    num_samples=4,
    prompt_low=8,
    prompt_high=16,
    output_low=4,
    output_high=16,
    uniform_output=8,
    uniform_rows=4,
    long_prompt=64,
    long_output=8,
)
"""A smoke test: every line of the harness in seconds."""


_SEEDS = {
    "rl_longtail": 0,
    "rl_uniform": 1,
    "long_prompt": 2,
    "long_prompt_single": 2,
    "single_stream": 3,
}
WORKLOADS = tuple(_SEEDS)
"""Names, in the order of the tables.

- `rl_longtail`: a GRPO step. 16 prompts of 64 to 128 tokens, 8 samples each, whose lengths are
  lognormal (median 64, sigma 0.8) clipped to 16 .. 256.
- `rl_uniform`: the same without a tail: every output has 128 tokens; 64 rows at a time.
- `long_prompt`: 8 samples of one prompt of 2048 tokens, 64 tokens each.
- `long_prompt_single`: one sample of it.
- `single_stream`: one request, 128 tokens after a prompt of 128.
"""


def make_workload(
    name: str, vocab_size: int, *, is_quick: bool = False, sizes: Sizes | None = None
) -> Workload:
    """Builds a workload; equal arguments give equal requests.

    Args:
        name: One of `WORKLOADS`.
        vocab_size: Prompt tokens are below it.
        is_quick: The same shape with few and short requests.
        sizes: Other sizes instead.

    Raises:
        ValueError: for an unknown name.
    """
    if name not in _SEEDS:
        raise ValueError(f"workload must be one of {list(WORKLOADS)}, got {name!r}")
    sizes = sizes or (QUICK if is_quick else FULL)
    rng, is_long = np.random.default_rng(_SEEDS[name]), name.startswith("long")
    lengths = [sizes.long_prompt if is_long else sizes.prompt_high]
    if name.startswith("rl"):
        lengths = rng.integers(sizes.prompt_low, sizes.prompt_high + 1, sizes.num_prompts).tolist()
    prompts = [rng.integers(FIRST_TOKEN_ID, vocab_size, length).tolist() for length in lengths]
    num_samples = 1 if "single" in name else sizes.num_samples
    count = len(prompts) * num_samples
    outputs = [sizes.long_output if is_long else sizes.uniform_output] * count
    if name == "rl_longtail":
        drawn = rng.lognormal(np.log(4 * sizes.output_low), 0.8, count).round()
        outputs = np.clip(drawn, sizes.output_low, sizes.output_high).astype(int).tolist()
    return Workload(
        name=name,
        prompts=tuple(map(tuple, prompts)),
        num_samples=num_samples,
        output_lengths=tuple(outputs),
        num_rows=min(sizes.uniform_rows, count) if name == "rl_uniform" else count,
    )
