"""Finds out when a cluster's trainer has moved on since the engine got its weights."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

from flax import nnx
from tunix.rl import rl_cluster, rl_learner
from tunix.sft import utils as sft_utils


class TrainerFollower:
    """Compares the trainer's optimizer steps with those that the engine's weights have.

    Tunix's learners sync once a global step. Where `mini_batch_size` is below the batch, the
    optimizer steps several times in it. Tunix's vanilla engine shares the actor's arrays, so it
    samples each mini-batch with the newest ones; and the loss without old log-probs takes that for
    granted. Calls come one at a time.
    """

    def __init__(self) -> None:
        self._cluster: weakref.ref[rl_cluster.RLCluster] | None = None
        self._served_steps = 0

    def bind(self, cluster: rl_cluster.RLCluster | None) -> None:
        """Follows the trainer of a cluster, which may still be under construction."""
        self._cluster = None if cluster is None else weakref.ref(cluster)

    def note_served(self) -> None:
        """Notes that the engine has the trainer's weights of now."""
        trainer = self._trainer()
        self._served_steps = 0 if trainer is None else trainer.train_steps

    def newer_params(self) -> tuple[nnx.State, tuple[Any, ...]] | None:
        """The trainer's parameters, and their filter, if the engine's are of an earlier step."""
        trainer = self._trainer()
        if trainer is None or trainer.train_steps == self._served_steps:
            return None
        kinds = (nnx.LoRAParam if sft_utils.is_lora_enabled(trainer.model) else nnx.Param,)
        return nnx.state(trainer.model, kinds), kinds

    def _trainer(self) -> Any:
        cluster = None if self._cluster is None else self._cluster()
        # A cluster makes its rollout before its trainer.
        return getattr(cluster, "actor_trainer", None)


def is_in_learner() -> bool:
    """Whether a learner of `tunix.rl.rl_learner` is a caller: it never trains in such a call.

    Agents sample while the trainer works: there the learner decides when weights are synced.
    """
    frame = inspect.currentframe()
    try:
        while frame is not None:
            if frame.f_globals is vars(rl_learner):
                return True
            frame = frame.f_back
        return False
    finally:
        del frame  # a cycle otherwise
