from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tunix_sgljax.checkpoints.run_state import keep_state, restored_state

logger = logging.getLogger(__name__)

_NAME = "rows"


class DataPlace:
    """Numbers of the rows that were trained on or dropped, and what the rows read so far were.

    Not all below a number: groups that are carried are trained on after later ones. All rows below
    `num_below` are used.
    """

    def __init__(self, num_below: int = 0, kept: Mapping[str, Any] | None = None) -> None:
        fresh = {"below": num_below, "above": [], "dropped": False, "read": 0, "digest": ""}
        kept = kept or fresh
        self.num_below: int = kept["below"]
        self.has_dropped: bool = kept["dropped"]
        self._above = set(kept["above"])
        self._read_before, self._digest_before = kept["read"], kept["digest"]
        self._num_read = 0
        self._hash = hashlib.blake2b(digest_size=8)

    def __contains__(self, number: int) -> bool:
        return number < self.num_below or number in self._above

    def use(self, trained: Iterable[int], dropped: Sequence[int] = ()) -> None:
        """Takes rows that were trained on, and rows that were dropped."""
        self.has_dropped |= bool(dropped)
        self._above.update(trained, dropped)
        while self.num_below in self._above:
            self._above.remove(self.num_below)
            self.num_below += 1

    def read(self, prompt: Any) -> None:
        """Takes the prompt of the next row of the data; warns once where the data has changed."""
        text = str(prompt).encode("utf-8", "surrogatepass")
        self._hash.update(len(text).to_bytes(8, "little") + text)
        self._num_read += 1
        if self._num_read == self._read_before and self._hash.hexdigest() != self._digest_before:
            logger.warning(
                "the first %d prompts of train_ds are not those that the checkpoint was trained "
                "with: rows are known by their number, so that some may be trained on twice and "
                "others never. Shuffle with a fixed seed, or start another checkpoint folder",
                self._num_read,
            )

    def end(self) -> None:
        """The data is over; warns if there were more rows before."""
        if self._num_read < self._read_before:
            logger.warning(
                "train_ds has %d rows; the checkpoint was trained with at least %d",
                self._num_read,
                self._read_before,
            )
            self._read_before = 0

    def to_json(self) -> dict[str, Any]:
        """What the next process needs, once rows are read."""
        return {
            "below": self.num_below,
            "above": sorted(self._above),
            "dropped": self.has_dropped,
            "read": self._num_read,
            "digest": self._hash.hexdigest(),
        }


def restored_place(trainer: Any, num_below: int) -> DataPlace:
    """Where the checkpoint of a trainer was in its data; its next ones keep where it is then.

    The trainer is Tunix's, before it trains. Another learner's checkpoint does not say:
    `num_below`.
    """
    place = DataPlace(num_below, restored_state(trainer, _NAME))
    keep_state(trainer, _NAME, place.to_json)
    return place
