"""Lengths of answers: drawn from a distribution, or recorded."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from sgljax_engine.checks import check_count
from sgljax_engine.errors import InvalidConfigError


class Lengths(Protocol):
    """Lengths of the answers to each prompt of a data set."""

    @property
    def max_new_tokens(self) -> int:
        """The limit of every request."""
        ...

    def draw(self, prompt: int, count: int, rng: random.Random) -> list[int]:
        """Lengths of samples of a prompt, at least 1."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class LognormalLengths:
    """Lognormal: each prompt has a median of its own, around which its samples lie.

    Attributes:
        median: Tokens of the median answer to the median prompt.
        prompt_sigma: Sigma of the prompts' medians.
        sample_sigma: Sigma of a prompt's samples.
        max_new_tokens: Longer answers are cut off there.
        seed: Of the prompts' medians.
    """

    median: float = 256.0
    prompt_sigma: float = 0.7
    sample_sigma: float = 0.5
    max_new_tokens: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the field."""
        check_count("max_new_tokens", self.max_new_tokens)
        for name in ("median", "prompt_sigma", "sample_sigma"):
            if not getattr(self, name) > (0 if name == "median" else -1e-9):
                raise InvalidConfigError(f"{name} must be >= 0, got {getattr(self, name)}")

    def draw(self, prompt: int, count: int, rng: random.Random) -> list[int]:
        """Draws around the prompt's own median."""
        own = random.Random(f"{self.seed} {prompt}").gauss(0.0, self.prompt_sigma)
        middle = math.log(self.median) + own
        drawn = (rng.lognormvariate(middle, self.sample_sigma) for _ in range(count))
        return [min(max(round(each), 1), self.max_new_tokens) for each in drawn]


class RecordedLengths:
    """Lengths that a run recorded: each prompt's own ones, drawn again.

    Attributes:
        max_new_tokens: The longest.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        """Takes the lengths of each prompt.

        Args:
            groups: For each prompt, the lengths of its samples.

        Raises:
            InvalidConfigError: when a prompt has none, or one is below 1.
        """
        if not groups:
            raise InvalidConfigError("lengths must hold at least one prompt, got none")
        for index, group in enumerate(groups):
            if not group or not all(isinstance(each, int) and each >= 1 for each in group):
                raise InvalidConfigError(
                    f"lengths of prompt {index} must be integers >= 1, at least one, got {group}"
                )
        self._groups = [list(group) for group in groups]
        self.max_new_tokens = max(max(group) for group in groups)

    def draw(self, prompt: int, count: int, rng: random.Random) -> list[int]:
        """Draws without repetition while there are enough."""
        known = self._groups[prompt % len(self._groups)]
        whole, rest = divmod(count, len(known))
        return known * whole + rng.sample(known, rest)


def read_lengths(path: str | Path) -> RecordedLengths:
    """Reads recorded lengths: a JSON object whose "lengths" is a list of lists, one a prompt.

    Raises:
        InvalidConfigError: for a file that cannot be read, or holds anything else.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidConfigError(f"lengths {str(path)!r} cannot be read: {error}") from None
    groups = found.get("lengths") if isinstance(found, Mapping) else None
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        raise InvalidConfigError(
            f'lengths {str(path)!r} must be a JSON object with "lengths": a list of lists'
        )
    return RecordedLengths(groups)
