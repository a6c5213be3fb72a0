"""Tunix's trajectory collection with the weight version behind each token of a conversation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tunix.rl.agentic.agents.agent_types import Step
from tunix.rl.agentic.trajectory.trajectory_collect_engine import TrajectoryCollectEngine

from sgljax_engine import InvalidRequestError
from tunix_sgljax.in_flight.episodes import EpisodeError, EpisodeRules, contained
from tunix_sgljax.in_flight.outputs import VersionedRolloutOutput
from tunix_sgljax.in_flight.policy_versions import NO_VERSION
from tunix_sgljax.padding import strip_prompt

logger = logging.getLogger(__name__)

_CLOSE_LIMIT_S = 150.0
_VERSION = "policy_version"
"""Where Tunix notes the policy, in an episode and in its environment's task."""


class VersionedCollectEngine(TrajectoryCollectEngine):
    """Collects one episode and, in Token mode, adds to its dict.

    `token_versions` is int32 and as long as `conversation_tokens`: the engine's weight version
    that sampled each token of the assistant, `NO_VERSION` for the environment's. `sampling_masks`
    has the ids that each was drawn from, none for tokens that were not sampled. `model_call`
    must return a VersionedRolloutOutput. `num_turns` counts its calls; `num_retokenized` those that
    did not continue the tokens that are trained on. `has_failed` says that the episode has no
    tokens, since something of it failed and its group is dropped.
    """

    def __init__(self, *args: Any, rules: EpisodeRules, **options: Any) -> None:
        super().__init__(*args, **options)
        self._rules = rules
        self._outputs: dict[int, VersionedRolloutOutput] = {}
        self._retokenized: set[int] = set()

    async def collect(self, mode: str = "Conversation") -> Any:
        """Collects an episode, as `TrajectoryCollectEngine.collect` does."""
        try:
            return await self._collect(mode)
        except BaseException as error:
            task = asyncio.current_task()
            assert task is not None
            if isinstance(error, asyncio.CancelledError) and task.cancelling():
                raise  # the learner ends the episode
            failure = error if isinstance(error, EpisodeError) else EpisodeError(error, "episode")
        task.add_done_callback(_retrieve)
        await self._close_failed()
        group = self.env.extra_kwargs.get("group_id")
        await self._rules.failed(failure, group)
        if mode != "Token" or not self._rules.drops_failed:
            raise failure
        return self._no_tokens()

    async def _collect(self, mode: str) -> Any:
        model_call = self.model_call

        def recorded_call(*args: Any, **options: Any) -> Any:
            # An agent makes a step from its next input.
            number = len(self.agent.trajectory.steps)
            output = model_call(*args, **options)
            self._outputs[number] = output
            self._check_context(number, output)
            return output

        self.model_call = contained(recorded_call, "the model call")
        try:
            result = await super().collect(mode)
        finally:
            self.model_call = model_call
        if mode == "Token":
            steps = self.agent.trajectory.steps
            result["token_versions"] = token_versions(steps, self._outputs)
            result["sampling_masks"] = token_masks(steps, self._outputs)
            result["num_turns"] = len(self._outputs)
            result["num_retokenized"] = len(self._retokenized)
            if self._rules.masks_retokenized:
                result["conversation_masks"] = self._masked(result["conversation_masks"], steps)
        return result

    # ------------------------------------------------------------------ what may fail

    async def _run_with_timing(self, func: Any, *args: Any, timeout: float | None = None) -> Any:
        """Runs a function of the environment; none may take longer than an episode."""
        name = getattr(func, "__name__", type(func).__name__)
        call = contained(func, f"{type(self.env).__name__}.{name}")
        if timeout is not None:
            return await super()._run_with_timing(call, *args, timeout=timeout)
        try:
            return await super()._run_with_timing(call, *args, timeout=self.timeout)
        except TimeoutError as error:
            raise EpisodeError(
                TimeoutError(f"{name} took longer than episode_timeout ({self.timeout} s)"),
                f"{type(self.env).__name__}.{name}",
            ) from error

    async def _close(self) -> None:
        try:
            await self._run_with_timing(self.env.close, timeout=_CLOSE_LIMIT_S)
        except TimeoutError:
            logger.error("%s.close took longer than %s s", type(self.env).__name__, _CLOSE_LIMIT_S)

    async def _close_failed(self) -> None:
        """Closes the environment of an episode that failed, which Tunix does not."""
        try:
            await self._close()
        except EpisodeError as error:
            logger.error("%s of a failed episode failed too: %r", error.what, error.error)

    def _no_tokens(self) -> dict[str, Any]:
        """An episode that nothing is trained on."""
        nothing = np.zeros(0, np.int32)
        trajectory = self.agent.trajectory
        prompt = np.asarray(getattr(trajectory, "prompt_tokens", ()), np.int32)  # after the reset
        task = trajectory.task
        if task is None:
            task = {name: values for name, values in self.env.task.items() if name != _VERSION}
        return {
            "conversation_text": [],
            "prompt_tokens": prompt if prompt.size else np.array([self._rules.pad_id], np.int32),
            "conversation_tokens": nothing,
            "conversation_masks": nothing,
            "status": trajectory.status.name,
            "trajectory_reward": 0.0,
            "env_time": self.env_time,
            "reward_time": self.reward_time,
            "old_logprobs": np.zeros(0, np.float32),
            _VERSION: self._rules.policy_version(),
            "original_input": task,
            "group_id": self.env.extra_kwargs.get("group_id"),
            "token_versions": nothing,
            "sampling_masks": [],
            "num_turns": len(self._outputs),
            "num_retokenized": len(self._retokenized),
            "has_failed": True,
        }

    # ------------------------------------------------------------------ turns tokenised again

    def _check_context(self, number: int, output: VersionedRolloutOutput) -> None:
        """Compares a turn's prompt with the tokens before it that are trained on."""
        prompts_BP, pad_id = output.left_padded_prompt_tokens, self._rules.pad_id
        if prompts_BP is None:
            return
        found = strip_prompt(prompts_BP[0].tolist(), pad_id)
        if number == 0:
            limit = self._rules.max_prompt_length
            if len(found) > limit:
                raise InvalidRequestError(
                    f"the first prompt of an episode has {len(found)} tokens, more than "
                    f"RolloutConfig.max_prompt_length={limit}: Tunix's agentic learner would train "
                    f"on its last {limit} alone; the conversation is "
                    f"{str(self.agent.chat_completions)[:80]}"
                )
            return
        steps = self.agent.trajectory.steps[:number]
        trajectory: Any = self.agent.trajectory  # Tunix adds the tokens to the object
        parts = [strip_prompt(np.asarray(trajectory.prompt_tokens).tolist(), pad_id)]
        parts += [
            np.asarray(tokens).tolist()
            for step in steps
            for tokens in (step.assistant_tokens, step.env_tokens)
            if tokens is not None
        ]
        trained = [token for part in parts for token in part]
        if found != trained:
            self._retokenized.add(number)
            self._rules.retokenized(number, trained, found)

    def _masked(self, masks: np.ndarray, steps: Sequence[Step]) -> np.ndarray:
        """The mask of a conversation without turns whose context was another one."""
        masks, start = np.array(masks), 0
        for number, step in enumerate(steps):
            num_assistant, num_env = _num_tokens(step)
            if number in self._retokenized:
                masks[start : start + num_assistant] = 0
            start += num_assistant + num_env
        return masks


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Looks at a task's error, which was handed on; else asyncio logs that nobody did."""
    if not task.cancelled():
        task.exception()


def _num_tokens(step: Step) -> tuple[int, int]:
    """Tokens of the assistant and of the environment."""
    num_assistant, num_env = (
        0 if tokens is None else len(tokens) for tokens in (step.assistant_tokens, step.env_tokens)
    )
    return num_assistant, num_env


def token_versions(
    steps: Sequence[Step], outputs: Mapping[int, VersionedRolloutOutput]
) -> np.ndarray:
    """The weight versions along a conversation, in the order in which Tunix flattens it.

    `outputs` are of one prompt each, by the number of the step that the call led to. A call whose
    tokens Tunix dropped (for lack of response budget) has none.
    """
    parts = [np.zeros(0, np.int32)]
    for number, step in enumerate(steps):
        if step.assistant_tokens is not None:
            parts.append(_assistant_versions(number, step.assistant_tokens, outputs))
        if step.env_tokens is not None:
            parts.append(np.full(len(step.env_tokens), NO_VERSION, np.int32))
    return np.concatenate(parts)


def token_masks(
    steps: Sequence[Step], outputs: Mapping[int, VersionedRolloutOutput]
) -> list[np.ndarray]:
    """The sampling masks along a conversation, as `token_versions`; empty where there is none."""
    found: list[np.ndarray] = []
    nothing = np.zeros(0, np.int32)
    for number, step in enumerate(steps):
        masks = outputs[number].sampling_masks if number in outputs else None
        sampled = masks[0] if masks and step.assistant_tokens is not None else []
        found += [*sampled, *[nothing] * (sum(_num_tokens(step)) - len(sampled))]
    return found


def _assistant_versions(
    number: int, tokens: np.ndarray, outputs: Mapping[int, VersionedRolloutOutput]
) -> np.ndarray:
    """Versions of a step's tokens: the sampled ones, and those a chat parser appended.

    Tunix 0.1.7 keeps the same array as the call; later releases let the parser make a new one.
    """
    output = outputs.get(number)
    num_sampled = 0 if output is None else len(output.tokens[0])
    if output is None or not np.array_equal(tokens[:num_sampled], output.tokens[0]):
        raise InvalidRequestError(
            f"step {number} of a trajectory does not begin with the tokens of a model call: "
            "the agent must add one step for each response (update_from_model)"
        )
    added = np.full(len(tokens) - num_sampled, NO_VERSION, np.int32)
    return np.concatenate([output.weight_versions[0], added])
