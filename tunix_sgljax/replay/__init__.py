"""Sampling replay: a trainer's log-probs over the tokens that the sampler allowed."""

from tunix_sgljax.replay.examples import ReplayPpoTrainExample, ReplayTrainExample, extended
from tunix_sgljax.replay.replay import REPLAY, Replay, replayed

__all__ = [
    "REPLAY",
    "Replay",
    "ReplayPpoTrainExample",
    "ReplayTrainExample",
    "extended",
    "replayed",
]
