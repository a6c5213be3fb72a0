"""Whether the Tunix that is tested with has `tunix.experimental`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_FILE = Path("experimental", "rollout", "sampler.py")


def _has_experimental() -> bool:
    """Looks where Tunix is or, once it is imported, where its packages are; imports nothing."""
    if "tunix" in sys.modules:
        folders = sys.modules["tunix"].__path__
    else:
        spec = importlib.util.find_spec("tunix")
        folders = (spec and spec.submodule_search_locations) or ()
    return any((Path(folder) / _FILE).is_file() for folder in folders)


HAS_EXPERIMENTAL = _has_experimental()
