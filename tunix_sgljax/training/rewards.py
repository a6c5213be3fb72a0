"""Built-in reward functions. Each compares a completion with the column `answer`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from sgljax_engine import InvalidConfigError

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def exact_match(completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 where the completion, stripped of surrounding white space, is the answer."""
    return [
        float(text.strip() == str(right).strip())
        for text, right in zip(completions, answer, strict=True)
    ]


def last_number(completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 where the last number of the completion equals the last number of the answer."""
    pairs = zip(map(_last_number, completions), map(_last_number, answer), strict=True)
    return [float(found is not None and found == wanted) for found, wanted in pairs]


def _last_number(text: Any) -> float | None:
    found = _NUMBER.findall(str(text))
    return float(found[-1].replace(",", "")) if found else None


BUILT_IN: dict[str, Callable[..., list[float]]] = {
    function.__name__: function for function in (exact_match, last_number)
}
"""Built-in functions by the name that `task.reward_functions` takes."""


def whole_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """The reward function, but refusing fractions.

    Tunix 0.1.7's PPOLearner adds rewards to an array of integers, which truncates fractions.
    """

    @functools.wraps(function)
    def checked(**arguments: Any) -> Any:
        rewards = function(**arguments)
        for reward in rewards:
            if reward != int(reward):
                raise InvalidConfigError(
                    f"the reward function {function.__name__} must return whole numbers with PPO, "
                    f"got {reward}: Tunix 0.1.7's PPOLearner cuts fractions off; scale the rewards"
                )
        return rewards

    return checked
