"""How many groups a step asks for, and what happens to those that it does not wait for."""

from __future__ import annotations

import dataclasses
from typing import Literal

from sgljax_engine import InvalidConfigError

UNFINISHED = ("carry", "drop")

MAX_CARRY_FACTOR, MAX_DROP_FACTOR = 2.0, 16.0
"""Carried groups that may not become older are at most as many as a step trains on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverSampling:
    """Over-sampling of groups, the samples of one prompt each.

    Attributes:
        factor: Groups in work in a step, in multiples of the groups that it trains on. In [1, 2],
            to drop in [1, 16]. The product is rounded.
        unfinished: What happens to groups that are not complete when enough others are. "carry"
            keeps their tokens, log-probs and versions, and goes on in the next step under the new
            weights. "drop" throws them away; their prompts are not asked again.
        max_age: Most weight updates between asking for a carried group and training on it, at
            least 1. A step waits for groups that would become older.
    """

    factor: float = 1.25
    unfinished: Literal["carry", "drop"] = "carry"
    max_age: int = 1

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the field."""
        if self.unfinished not in UNFINISHED:
            raise InvalidConfigError(
                f"unfinished must be one of {UNFINISHED}, got {self.unfinished!r}"
            )
        most = MAX_CARRY_FACTOR if self.carries else MAX_DROP_FACTOR
        factor, age = self.factor, self.max_age
        is_number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        if not is_number or not 1 <= factor <= most:
            raise InvalidConfigError(
                f"factor must be in [1, {most:g}] with unfinished={self.unfinished!r}, got "
                f"{factor!r}"
            )
        if not isinstance(age, int) or isinstance(age, bool) or age < 1:
            raise InvalidConfigError(f"max_age must be an integer >= 1, got {age!r}")

    @property
    def carries(self) -> bool:
        """Whether groups live through weight updates."""
        return self.unfinished == "carry"

    def num_asked(self, num_groups: int) -> int:
        """Groups in work in a step that trains on so many."""
        return round(self.factor * num_groups)
