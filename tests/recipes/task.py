"""What the recipes are trained on here: sums in words, and an environment of several turns."""

from __future__ import annotations

from typing import Any

import grain
from tunix.rl.agentic.environments.base_environment import BaseTaskEnv, EnvStepResult

from tests.recipes.rewards import characters

_NAMES = ("Ann", "Bob", "Cem", "Dia")


def rows(num: int) -> list[dict[str, str]]:
    """Questions with their answers, as Tunix's GSM8K module gives them."""
    questions = [f"{_NAMES[i % 4]} has {i} pens, finds {i}. How many?" for i in range(num)]
    return [
        {"prompts": text, "question": text, "answer": str(2 * i)}
        for i, text in enumerate(questions)
    ]


def create_dataset(num: int) -> grain.MapDataset:
    """What a recipe's `data_module` must have."""
    return grain.MapDataset.source(rows(num))


class Turns(BaseTaskEnv):
    """Asks again after the first answer."""

    def __init__(self, single_example: Any, **kwargs: Any) -> None:
        super().__init__(task=single_example, max_steps=2, **kwargs)

    def _initial_observation(self) -> Any:
        return self.task

    def _step_impl(self, action: Any) -> EnvStepResult:
        (reward,) = characters([self.task], [str(getattr(action, "action", action))])
        is_last = self.step_count == 2
        return EnvStepResult(observation="Sure?", reward=reward, done=is_last, info={})
