"""Training runs from a config file: what `tunix-sgljax train` does.

Importing this package imports neither Tunix nor JAX; the names below load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunix_sgljax.training.loading import load_config, to_yaml
    from tunix_sgljax.training.loop import RunResult, evaluate, prepare, run
    from tunix_sgljax.training.schema import TrainConfig

_LAZY = {
    "RunResult": "tunix_sgljax.training.loop",
    "TrainConfig": "tunix_sgljax.training.schema",
    "evaluate": "tunix_sgljax.training.loop",
    "load_config": "tunix_sgljax.training.loading",
    "prepare": "tunix_sgljax.training.loop",
    "run": "tunix_sgljax.training.loop",
    "to_yaml": "tunix_sgljax.training.loading",
}

__all__ = ["RunResult", "TrainConfig", "evaluate", "load_config", "prepare", "run", "to_yaml"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
