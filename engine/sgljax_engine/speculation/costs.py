"""What steps of each width cost on this machine. Written and read by the engine thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_LEARNING_RATE = 0.2


class StepCosts(NamedTuple):
    """Seconds of a step of a batch size.

    Attributes:
        plain: Of the program without drafts.
        widths: Of the program with drafts, for each number of `tokens`.
        tokens: Tokens of a step, of all rows together.
    """

    plain: float
    widths: tuple[float, ...]
    tokens: tuple[int, ...]

    def may_pay(self, num_rows: int, acceptance: float, num_drafts: int) -> bool:
        """Whether steps with drafts may be faster than the program without.

        Args:
            num_rows: Rows of the batch.
            acceptance: Share of right drafts, below 1.
            num_drafts: Most drafts of a row.
        """
        best = 0.0
        for tokens, cost in zip(self.tokens, self.widths, strict=True):
            each = min(tokens / num_rows - 1, num_drafts)
            right = acceptance * (1 - acceptance**each) / (1 - acceptance)
            best = max(best, (1 + right) / cost)
        return best > 1 / self.plain

    def learnt(self, passes: Sequence[int] | None, num_steps: int, seconds: float) -> StepCosts:
        """With what a dispatch took; each cost moves by its share of it.

        Args:
            passes: Steps of the program with drafts, for each width; None without.
            num_steps: Steps of the program without.
            seconds: Of all of them.
        """
        if passes is None:
            return self._replace(
                plain=self.plain * _step_towards(seconds, num_steps * self.plain, 1)
            )
        parts = [count * cost for count, cost in zip(passes, self.widths, strict=True)]
        expected = sum(parts)
        widths = (
            cost * _step_towards(seconds, expected, part / expected)
            for cost, part in zip(self.widths, parts, strict=True)
        )
        return self._replace(widths=tuple(widths))


def _step_towards(found: float, expected: float, share: float) -> float:
    """A factor that goes some way towards what was found; one dispatch cannot do much."""
    return min(max(found / expected, 0.5), 2.0) ** (_LEARNING_RATE * share)


class CostTable:
    """Measured costs by batch size."""

    def __init__(self, *, measures: bool) -> None:
        """Starts empty.

        Args:
            measures: Whether costs count. Without, every step costs the same, so that drafts are
                verified as long as there are any.
        """
        self.measures = measures
        self._costs: dict[int, StepCosts] = {}

    def __contains__(self, size: int) -> bool:
        """Whether a batch size needs no measurement."""
        return not self.measures or size in self._costs

    def put(self, size: int, costs: StepCosts) -> None:
        """Notes the costs of a batch size."""
        self._costs[size] = costs

    def get(self, size: int) -> StepCosts | None:
        """Of a batch size; None if they were not measured."""
        return self._costs.get(size)

    def learn(
        self, size: int, passes: Sequence[int] | None, num_steps: int, seconds: float
    ) -> None:
        """See `StepCosts.learnt`."""
        costs = self._costs.get(size)
        if costs is not None and num_steps:
            self._costs[size] = costs.learnt(passes, num_steps, seconds)

    def of_widths(self, size: int, num_widths: int) -> Sequence[float]:
        """What the choice of a width goes by."""
        costs = self._costs.get(size) if self.measures else None
        return (1.0,) * num_widths if costs is None else costs.widths
