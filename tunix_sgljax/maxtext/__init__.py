"""MaxText's models and its RL trainer on the embedded engine.

MaxText itself is imported by what runs its trainer alone: the rest reads its config by names.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunix_sgljax.maxtext.rollout import SglJaxMaxTextRollout

__all__ = ["SglJaxMaxTextRollout"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("tunix_sgljax.maxtext.rollout"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
