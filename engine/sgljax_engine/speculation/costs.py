"""Costs of steps of each width on this machine. Written and read by the engine thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sgljax_engine.speculation.plan import expected_right

_LEARNING_RATE = 0.2

_MARGIN = 1.05
"""How much faster drafts must promise to be: they take more of the host."""


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
        for tokens, cost in zip(self.tokens[1:], self.widths[1:], strict=True):
            each = min(tokens / num_rows - 1, num_drafts)
            best = max(best, (1 + expected_right(acceptance, each)) / cost)
        return best > _MARGIN / self.plain

    def learnt(self, passes: Sequence[int] | None, num_steps: int, seconds: float) -> StepCosts:
        """The costs after a dispatch, corrected by its time.

        Half of the error scales all costs; the other half scales only those of the steps that ran.
        A wider step never counts as the cheaper one.

        Args:
            passes: Steps of the program with drafts, for each width; None without.
            num_steps: Steps of the program without.
            seconds: Time of all these steps.
        """
        if passes is None:
            parts, plain_s = [0.0] * len(self.widths), num_steps * self.plain
        else:
            parts = [count * cost for count, cost in zip(passes, self.widths, strict=True)]
            plain_s = 0.0
        expected = sum(parts) + plain_s
        factor = min(max(seconds / expected, 0.5), 2.0) ** (_LEARNING_RATE / 2)
        made: list[float] = []
        for cost, part in zip(self.widths, parts, strict=True):
            made.append(cost * factor ** (1 + part / expected))
        for index in reversed(range(1, len(made))):
            made[index - 1] = min(made[index - 1], made[index])
        plain = min(self.plain * factor ** (1 + plain_s / expected), made[0])
        return self._replace(plain=plain, widths=tuple(made))


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
        """Costs of a batch size; None if they were not measured."""
        return self._costs.get(size)

    def learn(
        self, size: int, passes: Sequence[int] | None, num_steps: int, seconds: float
    ) -> None:
        """Corrects the costs of a batch size, as `StepCosts.learnt` does."""
        costs = self._costs.get(size)
        if costs is not None and num_steps:
            self._costs[size] = costs.learnt(passes, num_steps, seconds)

    def of_widths(self, size: int, num_widths: int) -> Sequence[float]:
        """The numbers by which a width is chosen."""
        costs = self._costs.get(size) if self.measures else None
        return (1.0,) * num_widths if costs is None else costs.widths
