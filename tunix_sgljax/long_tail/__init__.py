"""Steps that end before their longest answers: over-sampling with partial rollouts."""

from __future__ import annotations

from tunix_sgljax.long_tail.agentic import OverSamplingAgenticGrpoLearner
from tunix_sgljax.long_tail.config import OverSampling
from tunix_sgljax.long_tail.learner import OverSamplingGrpoLearner

__all__ = ["OverSampling", "OverSamplingAgenticGrpoLearner", "OverSamplingGrpoLearner"]
