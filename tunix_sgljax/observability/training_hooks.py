"""Hooks of Tunix's trainer: several at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunix.sft.hooks import TrainingHooks


class QuietHooks(TrainingHooks):
    """Hooks that do nothing; subclasses override some."""

    def on_train_start(self, train_ctx: Any) -> None:
        """A call of `train` begins; in RL, once per step."""

    def on_train_end(self, train_ctx: Any) -> None:
        """A call of `train` ends, and so do its computations."""

    def on_train_step_start(self, train_ctx: Any) -> None:
        """A micro-batch is about to be trained on."""

    def on_train_step_end(self, train_ctx: Any, train_step: int, train_loss: float) -> None:
        """The metrics of a step are written, one step late."""

    def on_eval_step_start(self, train_ctx: Any) -> None:
        """An evaluation step begins."""

    def on_eval_step_end(self, train_ctx: Any, eval_loss: float) -> None:
        """An evaluation ends."""


class HooksChain(TrainingHooks):
    """Several hooks, called in order."""

    def __init__(self, hooks: Sequence[TrainingHooks]) -> None:
        """Takes the hooks."""
        self._hooks = tuple(hooks)

    def on_train_start(self, train_ctx: Any) -> None:
        """Calls each hook, as do the methods below."""
        for each in self._hooks:
            each.on_train_start(train_ctx)

    def on_train_end(self, train_ctx: Any) -> None:  # noqa: D102
        for each in self._hooks:
            each.on_train_end(train_ctx)

    def on_train_step_start(self, train_ctx: Any) -> None:  # noqa: D102
        for each in self._hooks:
            each.on_train_step_start(train_ctx)

    def on_train_step_end(  # noqa: D102
        self, train_ctx: Any, train_step: int, train_loss: float
    ) -> None:
        for each in self._hooks:
            each.on_train_step_end(train_ctx, train_step, train_loss)

    def on_eval_step_start(self, train_ctx: Any) -> None:  # noqa: D102
        for each in self._hooks:
            each.on_eval_step_start(train_ctx)

    def on_eval_step_end(self, train_ctx: Any, eval_loss: float) -> None:  # noqa: D102
        for each in self._hooks:
            each.on_eval_step_end(train_ctx, eval_loss)


def add_training_hooks(trainer: Any, hooks: TrainingHooks) -> None:
    """Adds hooks to a Tunix trainer (`cluster.actor_trainer`), after its existing ones."""
    before = trainer.training_hooks
    trainer.with_training_hooks(hooks if before is None else HooksChain([before, hooks]))
