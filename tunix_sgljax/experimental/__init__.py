"""For Tunix's experimental, distributed RL: its `Sampler` protocol on the embedded engine.

Needs a Tunix that has `tunix.experimental`: importing this package fails with 0.1.7 and says so.
Nothing else imports it.
"""

from __future__ import annotations

from tunix_sgljax.experimental.requirement import require_experimental

require_experimental()

from tunix_sgljax.experimental.sampler import SglJaxSampler  # noqa: E402
from tunix_sgljax.experimental.transport import InProcessSource, InProcessTransport  # noqa: E402
from tunix_sgljax.experimental.worker import SglJaxRolloutWorker  # noqa: E402

__all__ = ["InProcessSource", "InProcessTransport", "SglJaxRolloutWorker", "SglJaxSampler"]
