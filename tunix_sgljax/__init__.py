"""Tunix rollouts on the embedded sgljax_engine.

The one-line switch in a GRPO script: `ClusterConfig(..., rollout_engine=SglJaxRollout)`.

Importing this package imports neither Tunix nor JAX; the names below load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunix_sgljax.exactness.mismatch import MismatchReport, mismatch_report
    from tunix_sgljax.factory import GrpoLearner, PpoLearner, RLCluster, create_sgljax_rollout
    from tunix_sgljax.in_flight.agentic import AgenticGrpoLearner
    from tunix_sgljax.in_flight.outputs import VersionedRolloutOutput
    from tunix_sgljax.long_tail import (
        OverSampling,
        OverSamplingAgenticGrpoLearner,
        OverSamplingGrpoLearner,
    )
    from tunix_sgljax.observability.progress import Progress
    from tunix_sgljax.observability.rollout_metrics import log_rollout_metrics
    from tunix_sgljax.observability.timeline import Timeline, record_timeline
    from tunix_sgljax.rollout import SglJaxRollout
    from tunix_sgljax.rollout.fleet import SglJaxFleetRollout

_LAZY = {
    "AgenticGrpoLearner": "tunix_sgljax.in_flight.agentic",
    "GrpoLearner": "tunix_sgljax.factory",
    "MismatchReport": "tunix_sgljax.exactness.mismatch",
    "OverSampling": "tunix_sgljax.long_tail",
    "OverSamplingAgenticGrpoLearner": "tunix_sgljax.long_tail",
    "OverSamplingGrpoLearner": "tunix_sgljax.long_tail",
    "PpoLearner": "tunix_sgljax.factory",
    "Progress": "tunix_sgljax.observability.progress",
    "RLCluster": "tunix_sgljax.factory",
    "SglJaxFleetRollout": "tunix_sgljax.rollout.fleet",
    "SglJaxRollout": "tunix_sgljax.rollout",
    "Timeline": "tunix_sgljax.observability.timeline",
    "VersionedRolloutOutput": "tunix_sgljax.in_flight.outputs",
    "create_sgljax_rollout": "tunix_sgljax.factory",
    "log_rollout_metrics": "tunix_sgljax.observability.rollout_metrics",
    "mismatch_report": "tunix_sgljax.exactness.mismatch",
    "record_timeline": "tunix_sgljax.observability.timeline",
}

__all__ = [
    "AgenticGrpoLearner",
    "GrpoLearner",
    "MismatchReport",
    "OverSampling",
    "OverSamplingAgenticGrpoLearner",
    "OverSamplingGrpoLearner",
    "PpoLearner",
    "Progress",
    "RLCluster",
    "SglJaxFleetRollout",
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
