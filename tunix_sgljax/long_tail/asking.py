"""Which groups a step asks for: those of Tunix's batch, and more before their turn."""

from __future__ import annotations

from typing import Any

import numpy as np
from tunix.rl.rollout.base_rollout import RolloutConfig

from tunix_sgljax.long_tail.feed import ROW, PromptFeed
from tunix_sgljax.long_tail.groups import GroupsInFlight


class GroupSource:
    """Asks for each prompt once, whichever way it comes. One thread at a time."""

    def __init__(self, feed: PromptFeed, groups: GroupsInFlight, num_samples: int) -> None:
        """Has asked for nothing.

        Args:
            feed: Prompts that may be taken early, whose batches Tunix has.
            groups: Where the groups are in work.
            num_samples: Samples of a prompt.
        """
        self._feed = feed
        self._groups = groups
        self._num_samples = num_samples
        self._known_rows: set[int] = set()

    def ask(self, training_input: dict[str, Any], config: RolloutConfig) -> int:
        """Asks for the groups of Tunix's batch that are not in work yet, and for more.

        Args:
            training_input: Tunix's columns, each prompt's repeated for its samples.
            config: Sampling settings.

        Returns:
            The number of groups that Tunix trains on.
        """
        groups, num_samples = self._groups, self._num_samples
        rows = training_input[ROW][::num_samples].tolist()
        groups.ask_again(config)
        for index, row in enumerate(rows):
            part = slice(index * num_samples, (index + 1) * num_samples)
            columns = {name: values[part] for name, values in training_input.items()}
            self._ask_once(row, columns, config)
        num_more = groups.config.num_asked(len(rows)) - len(groups)
        for row in self._feed.take_early(max(num_more, 0), is_owed=groups.config.keeps_prompts):
            columns: dict[str, Any] = {
                name: np.repeat(np.asarray(value)[None], num_samples, axis=0)
                for name, value in row.items()
            }
            columns["trajectory_ids"] = trajectory_ids(columns[ROW], num_samples)
            self._ask_once(row[ROW], columns, config)
        return len(rows)

    def _ask_once(self, row: int, columns: dict[str, Any], config: RolloutConfig) -> None:
        """Asks for a group, unless it was taken early."""
        if row in self._known_rows:
            return
        self._known_rows.add(row)
        self._groups.ask(row, {n: v for n, v in columns.items() if n != ROW}, config)


def trajectory_ids(rows: np.ndarray, num_samples: int) -> list[str]:
    """Tunix's names: the prompt's number in the data, and the sample's in its group."""
    return [f"{row}_{index % num_samples}" for index, row in enumerate(rows.tolist())]
