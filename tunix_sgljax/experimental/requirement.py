"""Requirement of `tunix_sgljax.experimental`; everything else also runs with Tunix 0.1.7."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path


def require_experimental() -> None:
    """Checks that `tunix.experimental` is installed.

    Raises:
        ImportError: names the required version.
    """
    spec = importlib.util.find_spec("tunix")
    file = Path("experimental", "rollout", "sampler.py")
    if spec is not None and spec.origin and (Path(spec.origin).parent / file).is_file():
        return
    try:
        found = f"google-tunix {metadata.version('google-tunix')} is installed"
    except metadata.PackageNotFoundError:
        found = "google-tunix is not installed"
    raise ImportError(
        "tunix_sgljax.experimental needs tunix.experimental, which Tunix has from 0.1.8 on (its "
        f"repository's main branch; no release up to 0.1.7 has it), and {found}"
    )
