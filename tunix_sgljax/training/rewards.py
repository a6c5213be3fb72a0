"""Built-in reward functions. Each compares a completion with the column `answer`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from sgljax_engine import InvalidConfigError

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def exact_match(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[Any], **_: Any
) -> list[float]:
    """1 where the completion, stripped of surrounding white space, is the answer."""
    del prompts
    return _compare(completions, answer, str.strip)


def last_number(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[Any], **_: Any
) -> list[float]:
    """1 where the last number of the completion equals the last number of the answer."""
    del prompts
    found = [_last_number(text) for text in completions]
    wanted = [_last_number(str(value)) for value in answer]
    return [
        float(number is not None and number == right)
        for number, right in zip(found, wanted, strict=True)
    ]


def answer_tag(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[Any], **_: Any
) -> list[float]:
    """1 where the text between the last <answer> and </answer> is the answer."""
    del prompts
    return _compare(completions, answer, _last_tag)


BUILT_IN: dict[str, Callable[..., list[float]]] = {
    "exact_match": exact_match,
    "last_number": last_number,
    "answer_tag": answer_tag,
}
"""Built-in functions by the name that `task.reward_functions` takes."""


def whole_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """The reward function, but refusing fractions.

    Tunix 0.1.7's PPOLearner adds rewards to an array of integers, which truncates fractions.
    """

    @functools.wraps(function)
    def checked(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> Any:
        rewards = function(prompts=prompts, completions=completions, **columns)
        for reward in rewards:
            if reward != int(reward):
                raise InvalidConfigError(
                    f"the reward function {function.__name__} must return whole numbers with PPO, "
                    f"got {reward}: Tunix 0.1.7's PPOLearner cuts fractions off; scale the rewards"
                )
        return rewards

    return checked


def _compare(
    completions: Sequence[str], answers: Sequence[Any], extract: Callable[[str], str | None]
) -> list[float]:
    return [
        float(extract(text) == str(right).strip())
        for text, right in zip(completions, answers, strict=True)
    ]


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def _last_tag(text: str) -> str | None:
    found = _TAG.findall(text)
    return found[-1].strip() if found else None
