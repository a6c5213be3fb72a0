"""What happens to a group whose episode fails, and to turns that were tokenised again."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from tunix.rl.agentic.agents.model_agent import ModelAgent
from tunix.rl.agentic.environments.base_environment import BaseTaskEnv, EnvStepResult

FAILED_EPISODES = ("raise", "drop")

_NUM_SHOWN = 8
"""Token ids that a warning shows."""


class EpisodeError(Exception):
    """Something of an episode, such as "Calculator.step", failed.

    SystemExit, KeyboardInterrupt and CancelledError would end the event loop or its tasks without a
    word, and StopIteration never arrives, so that others would wait for ever.
    """

    def __init__(self, error: BaseException, what: str) -> None:
        super().__init__(f"{what}: {error!r}")
        self.error = error
        self.what = what


class EpisodeRules(NamedTuple):
    """What an episode needs to know of its learner.

    `drops_failed`: a group with a failed episode is dropped. `masks_retokenized`: turns with
    another context are masked; `retokenized` is called with such a turn's number, the tokens before
    it that are trained on, and the prompt that it was sampled from, on the thread of its model
    call.
    """

    drops_failed: bool
    masks_retokenized: bool
    pad_id: int
    max_prompt_length: int
    policy_version: Callable[[], int]
    failed: Callable[[EpisodeError, Any], Awaitable[None]]
    retokenized: Callable[[int, Sequence[int], Sequence[int]], None]


async def cancel_others() -> None:
    """Cancels all other tasks of this loop, and waits for them."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def contained(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """The function, which raises nothing but EpisodeError and TimeoutError.

    An environment raises TimeoutError for an episode that ends as ENV_TIMEOUT.
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except (EpisodeError, TimeoutError):
            raise
        except BaseException as error:
            raise EpisodeError(error, what) from error

    return call


class UnmadeEnvironment(BaseTaskEnv):
    """Stands for an environment or an agent that could not be made; its episode fails."""

    def __init__(self, task: Any, error: EpisodeError, **names: Any) -> None:
        super().__init__(task=task, max_steps=1, **names)
        self._error = error

    def _initial_observation(self) -> Any:
        raise self._error

    def _step_impl(self, action: Any) -> EnvStepResult:
        raise self._error


def unmade(task: Any, error: EpisodeError, **names: Any) -> tuple[ModelAgent, UnmadeEnvironment]:
    return ModelAgent(system_prompt=""), UnmadeEnvironment(task, error, **names)


def describe_difference(trained: Sequence[int], found: Sequence[int]) -> str:
    """Where two lists of token ids begin to differ, and the next ids of both."""
    pairs = zip(trained, found, strict=False)
    same = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(trained), len(found)))
    shown = slice(same, same + _NUM_SHOWN)
    return (
        f"at token {same}: {list(trained[shown])} in the sequence that is trained on, "
        f"{list(found[shown])} in the prompt"
    )
