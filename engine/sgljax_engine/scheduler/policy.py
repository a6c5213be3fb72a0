"""How many KV tokens admission keeps free for the requests that already run.

The estimate follows SGLang's `new_token_ratio`: running requests are expected to use a fraction
of the tokens they may still generate. The fraction decays while all goes well, so the batch
grows, and jumps up after a retraction, so that retractions do not come in series.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from sgljax_engine.config import SchedulerConfig
from sgljax_engine.types import Request


class AdmissionPolicy:
    """Estimates the KV demand of running requests. Owned by the scheduler."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Starts at `config.init_new_token_ratio`."""
        self._config = config
        self.new_token_ratio = config.init_new_token_ratio

    def on_decode(self) -> None:
        """A decode dispatch went well: expect a little less."""
        decayed = self.new_token_ratio - self._config.new_token_ratio_decay
        self.new_token_ratio = max(decayed, self._config.min_new_token_ratio)

    def on_retract(self, running: Iterable[Request]) -> None:
        """Pages ran out: expect at least what the running requests have used so far."""
        used = allowed = 0
        for request in running:
            used += len(request.output_ids) + self._config.decode_steps
            allowed += request.params.max_new_tokens
        if allowed:
            self.new_token_ratio = max(self.new_token_ratio, min(used / allowed, 1.0))

    def expected_tokens(self, request: Request) -> int:
        """Tokens that the request is expected to generate from now on."""
        return math.ceil(self.new_token_ratio * request.num_remaining)
