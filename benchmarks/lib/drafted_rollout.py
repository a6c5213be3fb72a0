"""What a rollout with draft tokens did: seconds, tokens, and which drafts were right."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from sgljax_engine.config import DRAFTERS
from tunix_sgljax.observability.observers import RolloutTotals


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftedRollout:
    """One rollout, or the sum of several.

    Attributes:
        seconds: Seconds in which a `generate` call was under way.
        num_tokens: Tokens generated.
        num_accepted: Right draft tokens, by drafter.
        num_drafts: Draft tokens that were verified.
        num_verified: Tokens from dispatches that may verify drafts.
        num_verify_rows: Rows of their steps, all steps together.
        saved_s: Seconds that drafts saved, by the engine's costs of a step.
    """

    seconds: float
    num_tokens: int
    num_accepted: dict[str, int]
    num_drafts: int
    num_verified: int
    num_verify_rows: int
    saved_s: float

    @classmethod
    def between(cls, before: RolloutTotals, now: RolloutTotals) -> DraftedRollout:
        """The rollout between two totals of `RolloutObservers`."""
        counters = now.counters.since(before.counters)
        return cls(
            seconds=now.busy_s - before.busy_s,
            num_tokens=counters.num_output_tokens,
            num_accepted={name: getattr(counters, f"num_accepted_{name}") for name in DRAFTERS},
            num_drafts=counters.num_draft_tokens,
            num_verified=counters.num_verified_tokens,
            num_verify_rows=counters.num_verify_rows,
            saved_s=counters.speculation_saved_s,
        )

    @property
    def acceptance_length(self) -> float:
        """Tokens that a row got from a step that may verify drafts; 0 without such."""
        return self.num_verified / self.num_verify_rows if self.num_verify_rows else 0.0

    def accepted(self, drafter: str) -> float:
        """Share of all tokens that were right drafts of this drafter."""
        return self.num_accepted[drafter] / self.num_tokens

    @property
    def acceptance(self) -> float:
        """Share of all tokens that were right drafts."""
        return sum(self.num_accepted.values()) / self.num_tokens

    @property
    def draft_acceptance(self) -> float:
        """Share of the verified drafts that were right; 0 without any."""
        return sum(self.num_accepted.values()) / self.num_drafts if self.num_drafts else 0.0


def total(rollouts: Sequence[DraftedRollout]) -> DraftedRollout:
    """The sum of rollouts."""
    return DraftedRollout(
        seconds=sum(each.seconds for each in rollouts),
        num_tokens=sum(each.num_tokens for each in rollouts),
        num_accepted={name: sum(each.num_accepted[name] for each in rollouts) for name in DRAFTERS},
        num_drafts=sum(each.num_drafts for each in rollouts),
        num_verified=sum(each.num_verified for each in rollouts),
        num_verify_rows=sum(each.num_verify_rows for each in rollouts),
        saved_s=sum(each.saved_s for each in rollouts),
    )


def to_json(rollout: DraftedRollout) -> dict[str, Any]:
    """A rollout for a results file, with its acceptance."""
    return {
        **dataclasses.asdict(rollout),
        "acceptance": rollout.acceptance,
        "acceptance_length": rollout.acceptance_length,
    }
