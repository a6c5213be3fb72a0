"""Tunix's trajectory collection with the weight version behind each token of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tunix.rl.agentic.agents.agent_types import Step
from tunix.rl.agentic.trajectory.trajectory_collect_engine import TrajectoryCollectEngine

from sgljax_engine import InvalidRequestError
from tunix_sgljax.in_flight.outputs import VersionedRolloutOutput
from tunix_sgljax.in_flight.policy_versions import NO_VERSION


class VersionedCollectEngine(TrajectoryCollectEngine):
    """Collects one episode and, in Token mode, adds `token_versions` to its dict.

    `token_versions` is int32 and as long as `conversation_tokens`: the engine's weight version
    that sampled each token of the assistant, `NO_VERSION` for the environment's. `model_call`
    must return a VersionedRolloutOutput.
    """

    async def collect(self, mode: str = "Conversation") -> Any:
        """Collects an episode, as `TrajectoryCollectEngine.collect` does."""
        outputs: dict[int, VersionedRolloutOutput] = {}
        model_call = self.model_call

        def recorded_call(*args: Any, **options: Any) -> Any:
            # An agent makes a step from its next input.
            number = len(self.agent.trajectory.steps)
            outputs[number] = output = model_call(*args, **options)
            return output

        self.model_call = recorded_call
        try:
            result = await super().collect(mode)
        finally:
            self.model_call = model_call
        if mode == "Token":
            result["token_versions"] = token_versions(self.agent.trajectory.steps, outputs)
        return result


def token_versions(
    steps: Sequence[Step], outputs: Mapping[int, VersionedRolloutOutput]
) -> np.ndarray:
    """The weight versions along a conversation, in the order in which Tunix flattens it.

    Args:
        steps: Steps of the trajectory.
        outputs: Outputs of the model calls, each of one prompt, by the number of the step that the
            call led to. A call whose tokens Tunix dropped (for lack of response budget) has none.

    Raises:
        InvalidRequestError: for a step with tokens that no call returned.
    """
    parts = [np.zeros(0, np.int32)]
    for number, step in enumerate(steps):
        if step.assistant_tokens is not None:
            parts.append(_assistant_versions(number, step.assistant_tokens, outputs))
        if step.env_tokens is not None:
            parts.append(np.full(len(step.env_tokens), NO_VERSION, np.int32))
    return np.concatenate(parts)


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
