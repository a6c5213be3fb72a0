"""Where and when a measurement was made."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import platform
from pathlib import Path

from tunix_sgljax.cli.doctor_facts import num_cores

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


def describe_environment(device: str) -> Environment:
    """Returns this machine, with JAX's name of the device of a run."""
    return Environment(
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        cpu=cpu_model(),
        num_cores=num_cores(),
        device=device,
        python=platform.python_version(),
        versions={name: importlib.metadata.version(name) for name in PACKAGES},
    )


def cpu_model() -> str:
    """Returns the name of the processor, or its architecture if Linux does not tell."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()
