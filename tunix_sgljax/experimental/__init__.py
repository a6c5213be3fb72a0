"""For Tunix's experimental, distributed RL: its `Sampler` protocol on the embedded engine.

Needs a Tunix that has `tunix.experimental`: importing this package fails with 0.1.7 and says so.
Nothing else imports it.
"""

from __future__ import annotations

import importlib.util
from importlib import metadata


def _require_experimental() -> None:
    try:
        if importlib.util.find_spec("tunix.experimental.rollout.sampler") is not None:
            return
    except ModuleNotFoundError:
        pass  # of a parent
    try:
        found = f"google-tunix {metadata.version('google-tunix')} is installed"
    except metadata.PackageNotFoundError:
        found = "google-tunix is not installed"
    raise ImportError(
        "tunix_sgljax.experimental needs tunix.experimental, which Tunix has from 0.1.8 on (its "
        f"repository's main branch; no release up to 0.1.7 has it), and {found}"
    )


_require_experimental()

from tunix_sgljax.experimental.artifacts import WeightFolder, WeightFolderSource  # noqa: E402
from tunix_sgljax.experimental.sampler import SglJaxSampler  # noqa: E402
from tunix_sgljax.experimental.transport import InProcessSource, InProcessTransport  # noqa: E402
from tunix_sgljax.experimental.worker import SglJaxRolloutWorker  # noqa: E402

__all__ = [
    "InProcessSource",
    "InProcessTransport",
    "SglJaxRolloutWorker",
    "SglJaxSampler",
    "WeightFolder",
    "WeightFolderSource",
]
