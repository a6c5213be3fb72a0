"""Which groups a step asks for: those of Tunix's batch, and more before their turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tunix.rl.rollout.base_rollout import RolloutConfig

from tunix_sgljax.long_tail.feed import PromptFeed
from tunix_sgljax.long_tail.groups import Group, GroupsInFlight


class GroupSource:
    """Asks for each prompt once, whichever way it comes, and takes the groups of a step.

    One thread at a time.
    """

    def __init__(self, feed: PromptFeed, groups: GroupsInFlight) -> None:
        self._feed = feed
        self._groups = groups
        self._taken_early: set[int] = set()

    def ask(self, numbers: Sequence[int], config: RolloutConfig) -> None:
        """Asks for the groups of Tunix's batch that are not in work yet, and for more."""
        groups = self._groups
        groups.ask_again(config)
        for number in numbers:
            row = self._feed.pop(number)
            if number not in self._taken_early:
                groups.ask(row, config)
        num_more = groups.config.num_asked(len(numbers)) - len(groups)
        for row in self._feed.take_early(max(num_more, 0), is_owed=groups.config.keeps_prompts):
            self._taken_early.add(row.number)
            groups.ask(row, config)

    def take(self, count: int) -> list[Group]:
        """`GroupsInFlight.take`; the rows of these groups, and those dropped, are used."""
        taken = self._groups.take(count)
        dropped = [] if self._groups.config.keeps_prompts else self._groups.ended
        self._feed.place.use(
            [group.row.number for group in taken], [group.row.number for group in dropped]
        )
        return taken


def trajectory_ids(rows: np.ndarray, num_samples: int) -> list[str]:
    return [f"{row}_{index % num_samples}" for index, row in enumerate(rows.tolist())]
