"""Tunix's trajectory collection with the weight version behind each token of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tunix.rl.agentic.agents.agent_types import Step
from tunix.rl.agentic.trajectory.trajectory_collect_engine import TrajectoryCollectEngine

from tunix_sgljax.outputs import VersionedRolloutOutput
from tunix_sgljax.policy_versions import NO_VERSION


class VersionedCollectEngine(TrajectoryCollectEngine):
    """Collects one episode and, in Token mode, adds `token_versions` to its dict.

    `token_versions` is int32 and as long as `conversation_tokens`: the engine's weight version
    that sampled each token of the assistant, `NO_VERSION` for the environment's. `model_call`
    must return a VersionedRolloutOutput.
    """

    async def collect(self, mode: str = "Conversation") -> Any:
        """See `TrajectoryCollectEngine.collect`."""
        outputs: list[VersionedRolloutOutput] = []
        model_call = self.model_call

        def recorded_call(*args: Any, **options: Any) -> Any:
            output = model_call(*args, **options)
            outputs.append(output)
            return output

        self.model_call = recorded_call
        try:
            result = await super().collect(mode)
        finally:
            self.model_call = model_call
        if mode == "Token":
            result["token_versions"] = token_versions(self.agent.trajectory.steps, outputs)
        return result


def token_versions(steps: Sequence[Step], outputs: Sequence[VersionedRolloutOutput]) -> np.ndarray:
    """The weight versions along a conversation, in the order in which Tunix flattens it.

    Args:
        steps: Of the trajectory. Calls whose tokens Tunix dropped (the response budget was used
            up) have no step.
        outputs: Of the model calls, each of one prompt.
    """
    # Steps hold the very arrays that the calls returned.
    sampled = {id(output.tokens[0]): output.weight_versions[0] for output in outputs}
    parts = [np.zeros(0, np.int32)]
    for step in steps:
        if step.assistant_tokens is not None:
            parts.append(sampled[id(step.assistant_tokens)])
        if step.env_tokens is not None:
            parts.append(np.full(len(step.env_tokens), NO_VERSION, np.int32))
    return np.concatenate(parts)
