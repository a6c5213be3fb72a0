"""What filters that leave out tokens do to the log-probs of a trainer without replay."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from sgljax_engine import RequestOutput, SamplingParams
from tunix_sgljax.sampling import describe_filters, truncates

logger = logging.getLogger(__name__)


class TruncationAdvice:
    """Tells once how far the trainer's log-probs are from those that were sampled from.

    Attributes:
        is_due: Whether a trainer takes the samples, and nobody was told.
    """

    def __init__(self) -> None:
        """Nobody takes the samples yet."""
        self.is_due = False

    def look(self, params: SamplingParams, outputs: Sequence[RequestOutput]) -> None:
        """Warns about the first outputs of filters that leave out tokens."""
        if not self.is_due or not truncates(params):
            return
        scaled = np.array([logp for output in outputs for logp in output.scaled_logprobs])
        drawn = np.array([logp for output in outputs for logp in output.processed_logprobs])
        self.is_due = False
        logger.warning(
            "samples are drawn with %s, and Tunix's learner takes log-probs over the whole "
            "vocabulary: the two differ by %.3g on average in the first batch. "
            "tunix_sgljax.GrpoLearner replays what was sampled from (replay='auto'); or sample "
            "without filters",
            describe_filters(params),
            np.abs(drawn - scaled).mean() if len(drawn) else 0.0,
        )
