"""Where and when a measurement was made."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path

PACKAGES = ("google-tunix", "jax", "jaxlib", "flax", "numpy", "tunix-sgljax")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environment:
    """Where and when the runs were made."""

    date: str
    cpu: str
    num_cores: int
    device: str
    python: str
    versions: dict[str, str]


def describe_environment(device: str, more_packages: Sequence[str] = ()) -> Environment:
    """Returns this machine, with the JAX device that a run reported.

    Args:
        device: JAX's name for it.
        more_packages: Whose versions matter beside `PACKAGES`.
    """
    return Environment(
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        cpu=cpu_model(),
        num_cores=len(os.sched_getaffinity(0)),
        device=device,
        python=platform.python_version(),
        versions={name: importlib.metadata.version(name) for name in (*PACKAGES, *more_packages)},
    )


def cpu_model() -> str:
    """Returns the name of the processor, or its architecture where Linux does not tell."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()
