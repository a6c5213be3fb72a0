"""What the checkpoints of a training keep beside its weights: its place in the data and noise."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from etils import epath
from tunix.sft.checkpoint_manager import CheckpointManager

_KEY = "tunix_sgljax"
"""Orbax's custom metadata, written with the weights or not at all, have it under this name."""

_METADATA = "_CHECKPOINT_METADATA"


class CheckpointsWithState:
    """The checkpoint manager of a Tunix trainer, whose checkpoints also keep parts of a run.

    The last checkpoint of a run, for which Tunix gives no metadata, gets those of its weight
    update: its global step too.
    """

    def __init__(self, inner: CheckpointManager) -> None:
        self._inner = inner
        self._readers: dict[str, Callable[[], Any]] = {}
        self._newest: tuple[int, dict[str, Any]] = (-1, {})

    def keep(self, name: str, read: Callable[[], Any]) -> None:
        """Adds a part, which is read after each weight update; another of that name goes."""
        self._readers[name] = read

    def save(
        self,
        step: int,
        *models: Any,
        custom_metadata: dict[str, Any] | None = None,
        **options: Any,  # Tunix's; releases differ
    ) -> bool:
        if custom_metadata is not None or self._newest[0] != step:
            parts = {name: read() for name, read in self._readers.items()}
            self._newest = step, {**(custom_metadata or {}), _KEY: parts}
        return self._inner.save(step, *models, custom_metadata=self._newest[1], **options)

    def latest_step(self) -> int | None:
        return self._inner.latest_step()

    def maybe_restore(self, *models: Any, **options: Any) -> tuple[int, dict[str, Any]]:
        return self._inner.maybe_restore(*models, **options)

    def close(self) -> None:
        self._inner.close()


def keep_state(trainer: Any, name: str, read: Callable[[], Any]) -> None:
    """Has every later checkpoint of a trainer keep a part of the run. Before it trains.

    `read` returns the part after a weight update, as JSON holds it, on the training thread.
    """
    if trainer.config.checkpoint_root_directory is None:
        return
    if not isinstance(trainer.checkpoint_manager, CheckpointsWithState):
        trainer.checkpoint_manager = CheckpointsWithState(trainer.checkpoint_manager)
    trainer.checkpoint_manager.keep(name, read)


def restored_state(trainer: Any, name: str) -> Any:
    """A part of the run that the checkpoint of a trainer kept; None where it has none."""
    root = trainer.config.checkpoint_root_directory
    if root is None or not trainer.train_steps:
        return None
    for folder in epath.Path(root).iterdir():
        # Options of Orbax may put a prefix or zeros in front.
        number = re.search(r"\d+$", folder.name)
        file = folder / _METADATA
        if number and int(number[0]) == trainer.train_steps and file.exists():
            custom = json.loads(file.read_text()).get("custom_metadata") or {}
            return custom.get(_KEY, {}).get(name)
    return None
