"""Whether the Tunix that is tested with has `tunix.experimental`. Imports no Tunix."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_SPEC = importlib.util.find_spec("tunix")
_FILE = Path("experimental", "rollout", "sampler.py")

HAS_EXPERIMENTAL = bool(
    _SPEC is not None and _SPEC.origin and (Path(_SPEC.origin).parent / _FILE).is_file()
)
