"""Tunix rollouts on the embedded sgljax_engine.

The one-line switch in a GRPO script: `ClusterConfig(..., rollout_engine=SglJaxRollout)`.

Importing this package imports neither Tunix nor JAX; the names below load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunix_sgljax.agentic import AgenticGrpoLearner
    from tunix_sgljax.factory import GrpoLearner, RLCluster, create_sgljax_rollout
    from tunix_sgljax.mismatch import MismatchReport, mismatch_report
    from tunix_sgljax.outputs import VersionedRolloutOutput
    from tunix_sgljax.progress import Progress
    from tunix_sgljax.rollout import SglJaxRollout
    from tunix_sgljax.rollout_metrics import log_rollout_metrics
    from tunix_sgljax.timeline import Timeline, record_timeline

_LAZY = {
    "AgenticGrpoLearner": "tunix_sgljax.agentic",
    "GrpoLearner": "tunix_sgljax.factory",
    "MismatchReport": "tunix_sgljax.mismatch",
    "Progress": "tunix_sgljax.progress",
    "RLCluster": "tunix_sgljax.factory",
    "SglJaxRollout": "tunix_sgljax.rollout",
    "Timeline": "tunix_sgljax.timeline",
    "VersionedRolloutOutput": "tunix_sgljax.outputs",
    "create_sgljax_rollout": "tunix_sgljax.factory",
    "log_rollout_metrics": "tunix_sgljax.rollout_metrics",
    "mismatch_report": "tunix_sgljax.mismatch",
    "record_timeline": "tunix_sgljax.timeline",
}

__all__ = [
    "AgenticGrpoLearner",
    "GrpoLearner",
    "MismatchReport",
    "Progress",
    "RLCluster",
    "SglJaxRollout",
    "Timeline",
    "VersionedRolloutOutput",
    "create_sgljax_rollout",
    "log_rollout_metrics",
    "mismatch_report",
    "record_timeline",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
