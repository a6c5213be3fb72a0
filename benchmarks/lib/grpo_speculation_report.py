"""The report of `benchmarks/training/grpo_speculation.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.lib.drafted_rollout import DraftedRollout, to_json, total
from benchmarks.lib.grpo_turns import Training
from benchmarks.lib.repeated_rollouts import Repeats
from benchmarks.lib.tool_rollouts import NUM_COMPILING, ToolRollouts
from sgljax_engine.config import DRAFTERS

MODES = ("off", "auto")
"""Values of the engine option `speculation` that are compared."""

_ACCEPTANCE_HEAD = f"all tokens | {' | '.join(DRAFTERS)} | of the drafts | tokens a step"

FACT = (
    'Columns of the acceptance: right drafts as shares of "all tokens", then those of each '
    'drafter; the share "of the drafts" that were right; "tokens a step", the `acceptance_length` '
    "of steps that may verify drafts. On CPUs those are the steps of at most 32 rows"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Epoch:
    """One pass over the prompts.

    Attributes:
        epoch: From 1.
        reward: Mean of its steps.
        off_s, auto_s: Median seconds of a rollout, without drafts and with.
        ratio: Median over the steps of how many times as fast the rollout with drafts was.
        drafted: Sum of the rollouts with drafts.
    """

    epoch: int
    reward: float
    off_s: float
    auto_s: float
    ratio: float
    drafted: DraftedRollout


def epochs_of(trainings: dict[str, Training], steps_per_epoch: int) -> list[Epoch]:
    """The epochs of two trainings."""
    epochs = []
    for start in range(0, len(trainings["off"].rollouts), steps_per_epoch):
        steps = slice(start, start + steps_per_epoch)
        off, auto = (trainings[mode].rollouts[steps] for mode in MODES)
        ratios = [a.seconds / b.seconds for a, b in zip(off, auto, strict=True)]
        epoch = Epoch(
            epoch=len(epochs) + 1,
            reward=float(np.mean(trainings["off"].rewards[steps])),
            off_s=float(np.median([each.seconds for each in off])),
            auto_s=float(np.median([each.seconds for each in auto])),
            ratio=float(np.median(ratios)),
            drafted=total(auto),
        )
        epochs.append(epoch)
    return epochs


def format_difference(difference: dict[str, int], num_steps: int) -> str:
    """Says whether the trainings are equal."""
    if not difference:
        return (
            f"Sampled tokens, rewards and losses of all {num_steps} steps and the weights after "
            "the last one are equal to the bit."
        )
    found = ", ".join(f"{name} from step {step} on" for name, step in difference.items())
    return f"**The trainings differ**: {found}."


def epoch_lines(epochs: Sequence[Epoch]) -> list[str]:
    """The table of the epochs."""
    return [
        "## Training",
        "",
        "Seconds are medians of the steps of an epoch; the speed is the median of the steps' "
        "ratios, above 1 where drafts are faster.",
        "",
        f"| epoch | reward | rollout s, off | auto | speed | {_ACCEPTANCE_HEAD} |",
        f"|---:|---:|---:|---:|---:|{'---:|' * 6}",
        *(
            f"| {each.epoch} | {each.reward:.3f} | {each.off_s:.4f} | {each.auto_s:.4f} "
            f"| {each.ratio:.2f} | {_acceptance(each.drafted)} |"
            for each in epochs
        ),
        "",
    ]


def repeat_lines(repeats: Sequence[Repeats]) -> list[str]:
    """The table of the same prompts sampled again."""
    lines = [
        "## The same prompts again",
        "",
        "The policy at the end of the training samples the prompts of a step again and again, "
        "those of a row together. The speed is the median of the pairs, with their quartiles.",
        "",
        "| prompts | samples | tokens an answer | rollout s, off | auto | speed "
        f"| {_ACCEPTANCE_HEAD} | pairs | with other tokens |",
        f"|---:|---:|---:|---:|---:|---:|{'---:|' * 8}",
    ]
    for each in repeats:
        low, middle, high = np.quantile(each.ratios, (0.25, 0.5, 0.75))
        off_s, auto_s = (np.median(each.seconds[mode]) for mode in MODES)
        lines.append(
            f"| {each.num_prompts} | {each.num_rows} | {each.answer_tokens:.1f} | {off_s:.4f} "
            f"| {auto_s:.4f} | {middle:.2f} ({low:.2f} to {high:.2f}) "
            f"| {_acceptance(each.drafted)} | {len(each.ratios)} | {each.num_differing} |"
        )
    return [*lines, ""]


def tool_lines(tools: Sequence[ToolRollouts]) -> list[str]:
    """The table of the example with tools; nothing if it did not run."""
    if not tools:
        return []
    lines = [
        "## Turns with a tool",
        "",
        "Steps of `examples/grpo_tools.py`, whose episodes come and go; no two runs sample the "
        f"same tokens. The first {NUM_COMPILING} steps, which compile, are left out.",
        "",
        f"| episodes | speculation | steps | rollout s | tokens/s | {_ACCEPTANCE_HEAD} |",
        f"|---:|---|---:|---:|---:|{'---:|' * 6}",
    ]
    for each in tools:
        seconds = np.median([rollout.seconds for rollout in each.rollouts])
        lines.append(
            f"| {each.num_episodes} | {each.speculation} | {len(each.rollouts)} | {seconds:.3f} "
            f"| {each.tokens_per_s:.0f} | {_acceptance(total(each.rollouts))} |"
        )
    return [*lines, ""]


def _acceptance(rollout: DraftedRollout) -> str:
    by_drafter = " | ".join(f"{rollout.accepted(name):.1%}" for name in DRAFTERS)
    return (
        f"{rollout.acceptance:.1%} | {by_drafter} | {rollout.draft_acceptance:.0%} "
        f"| {rollout.acceptance_length:.2f}"
    )


def to_content(
    trainings: dict[str, Training],
    epochs: Sequence[Epoch],
    repeats: Sequence[Repeats],
    tools: Sequence[ToolRollouts],
) -> dict[str, Any]:
    """The results file's content, without tokens."""
    return {
        "steps": {name: _steps(training) for name, training in trainings.items()},
        "epochs": [
            {**dataclasses.asdict(each), "drafted": to_json(each.drafted)} for each in epochs
        ],
        "repeats": [
            {**dataclasses.asdict(each), "drafted": to_json(each.drafted)} for each in repeats
        ],
        "tools": [
            {**dataclasses.asdict(each), "rollouts": list(map(to_json, each.rollouts))}
            for each in tools
        ],
    }


def _steps(training: Training) -> list[dict[str, Any]]:
    columns = zip(training.rewards, training.losses, training.rollouts, strict=True)
    return [{"reward": reward, "loss": loss, **to_json(each)} for reward, loss, each in columns]
