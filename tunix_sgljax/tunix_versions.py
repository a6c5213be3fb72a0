"""What differs between the releases of Tunix that this package runs with.

Everything but `tunix_sgljax.experimental` works with 0.1.7 and with its successor alike, without
asking which of them it is. Imports no Tunix.
"""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path


def has_experimental() -> bool:
    """Whether the Tunix that would be imported has `tunix.experimental`, the Sampler protocol."""
    spec = importlib.util.find_spec("tunix")
    if spec is None or spec.origin is None:
        return False
    return (Path(spec.origin).parent / "experimental" / "rollout" / "sampler.py").is_file()


def require_experimental() -> None:
    """For modules that are of no use without `tunix.experimental`.

    Raises:
        ImportError: names the version that is needed.
    """
    if has_experimental():
        return
    try:
        found = f"google-tunix {metadata.version('google-tunix')} is installed"
    except metadata.PackageNotFoundError:
        found = "google-tunix is not installed"
    raise ImportError(
        "tunix_sgljax.experimental needs tunix.experimental, which Tunix has from 0.1.8 on (its "
        f"repository's main branch; no release up to 0.1.7 has it), and {found}"
    )
