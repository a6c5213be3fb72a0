"""How many groups a step asks for, and what happens to those that it does not wait for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from sgljax_engine import InvalidConfigError

UNFINISHED = ("carry", "drop", "abort")

MAX_KEEP_FACTOR, MAX_DROP_FACTOR = 2.0, 16.0
"""Groups that a step must wait for are at most as many as it trains on."""

KnownRewards = Callable[..., Sequence[float | None]]
"""Called as Tunix's reward functions are, with one group's texts so far as `completions`, and with
`finished`, whether each is whole. Returns the reward that each will have whatever still comes; None
where that is open."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverSampling:
    """Over-sampling of groups, the samples of one prompt each.

    Attributes:
        factor: Groups in work in a step, in multiples of the groups that it trains on. In [1, 2],
            to drop in [1, 16]. The product is rounded.
        unfinished: What happens to groups that are left when enough are complete. "carry" keeps
            their tokens, log-probs and versions, and goes on in the next step under the new
            weights. "drop" throws them away; their prompts are not asked again. "abort" throws
            away their tokens; their prompts are asked again in the next step.
        max_age: Most weight updates between asking for a carried group and training on it, or most
            times that a prompt is asked again; at least 1. A step waits for groups beyond that.
        known_rewards: Ends groups early whose rewards are known and equal, since no advantage is
            left; None ends none. It is called whenever there are new tokens, on the thread that
            waits for answers.
    """

    factor: float = 1.25
    unfinished: Literal["carry", "drop", "abort"] = "carry"
    max_age: int = 1
    known_rewards: KnownRewards | None = None

    def __post_init__(self) -> None:
        if self.unfinished not in UNFINISHED:
            raise InvalidConfigError(
                f"unfinished must be one of {UNFINISHED}, got {self.unfinished!r}"
            )
        most = MAX_KEEP_FACTOR if self.keeps_prompts else MAX_DROP_FACTOR
        factor, age = self.factor, self.max_age
        is_number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        if not is_number or not 1 <= factor <= most:
            raise InvalidConfigError(
                f"factor must be in [1, {most:g}] with unfinished={self.unfinished!r}, got "
                f"{factor!r}"
            )
        if not isinstance(age, int) or isinstance(age, bool) or age < 1:
            raise InvalidConfigError(f"max_age must be an integer >= 1, got {age!r}")
        if self.known_rewards is not None and not callable(self.known_rewards):
            raise InvalidConfigError(
                f"known_rewards must be a function or None, got {self.known_rewards!r}"
            )

    @property
    def carries(self) -> bool:
        """Whether groups live through weight updates."""
        return self.unfinished == "carry"

    @property
    def keeps_prompts(self) -> bool:
        """Whether every prompt is trained on, sooner or later."""
        return self.unfinished != "drop"

    def num_asked(self, num_groups: int) -> int:
        """Groups in work in a step that trains on so many."""
        return round(self.factor * num_groups)
