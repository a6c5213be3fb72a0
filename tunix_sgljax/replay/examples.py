"""Train examples with the masks that their completions were drawn from."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import numpy as np
from flax import struct
from tunix.rl.grpo import grpo_learner as tunix_grpo
from tunix.rl.ppo import ppo_learner as tunix_ppo

Example = TypeVar("Example")


@struct.dataclass(frozen=True)
class ReplayTrainExample(tunix_grpo.TrainExample):
    """Tunix's TrainExample with sampling masks.

    Attributes:
        sampling_masks: The ids that each token of `completion_ids` was drawn from, padded with -1;
            all -1 where the trainer takes the whole vocabulary. Shape: [B, C, N] int32.
    """

    sampling_masks: np.ndarray | None = None


@struct.dataclass(frozen=True)
class ReplayPpoTrainExample(tunix_ppo.TrainExample):
    """Tunix's TrainExample of PPO with `sampling_masks`, see `ReplayTrainExample`."""

    sampling_masks: np.ndarray | None = None


def extended(example: Any, kind: type[Example], **more: Any) -> Example:
    """The example as another class, which has more fields."""
    fields = {field.name: getattr(example, field.name) for field in dataclasses.fields(example)}
    return kind(**{**fields, **more})
