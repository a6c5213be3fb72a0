"""What MaxText's own RL trainer needs beside this package, and the lines that install it.

Imports neither JAX nor MaxText, so that the command line can refuse before anything is loaded.
`python -m tunix_sgljax.maxtext.requirements` writes the lines.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sgljax_engine import InvalidConfigError

MIN_PYTHON = (3, 12)
"""The oldest Python that MaxText's wheel accepts."""


class Wheel(NamedTuple):
    """A distribution on the package index, and the versions that are accepted."""

    name: str
    versions: str = ""

    def __str__(self) -> str:
        return self.name + self.versions


WITH_DEPENDENCIES = (Wheel("pathwaysutils", ">=0.1.13"),)
"""Wheels whose own requirements are needed too."""

WITHOUT_DEPENDENCIES = (
    Wheel("maxtext", ">=0.2.5"),
    Wheel("aqtp"),
    Wheel("tokamax"),
    Wheel("einshape"),
    Wheel("fire"),
    Wheel("drjax"),
    Wheel("xprof"),
    Wheel("tiktoken"),
    Wheel("math-verify"),
    Wheel("latex2sympy2-extended"),
    Wheel("antlr4-python3-runtime", "==4.9.3"),
)
"""Wheels to install with --no-deps.

What of their requirements is used comes with google-tunix and pathwaysutils. MaxText's wheel names
none without an extra, and its extras pin some 200 packages, vLLM and torch among them.
"""

WHEELS = (*WITH_DEPENDENCIES, *WITHOUT_DEPENDENCIES)
"""All of them; found by running MaxText 0.2.5's trainer with nothing else installed."""


def missing_wheels(installed: Mapping[str, str]) -> tuple[Wheel, ...]:
    """The wheels that are not among the installed distributions."""
    return tuple(wheel for wheel in WHEELS if wheel.name not in installed)


def installed_wheels() -> dict[str, str]:
    versions = {}
    for wheel in WHEELS:
        try:
            versions[wheel.name] = importlib.metadata.version(wheel.name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def install_line(wheels: Sequence[Wheel]) -> str:
    """The shell line that installs these wheels, and nothing that they merely name."""
    lines = []
    for options, group in (("", WITH_DEPENDENCIES), (" --no-deps", WITHOUT_DEPENDENCIES)):
        words = [f'"{wheel}"' for wheel in group if wheel in wheels]
        if words:
            lines.append(f"pip install{options} {' '.join(words)}")
    return " && ".join(lines)


def check_requirements(
    python: Sequence[int] = sys.version_info[:3], installed: Mapping[str, str] | None = None
) -> None:
    """Refuses an environment in which MaxText's trainer cannot be imported."""
    if tuple(python[:2]) < MIN_PYTHON:
        raise InvalidConfigError(
            f"MaxText needs Python {'.'.join(map(str, MIN_PYTHON))} or newer, and this is "
            f"{'.'.join(map(str, python[:3]))}: make an environment of a newer one "
            "(python3.12 -m venv FOLDER), install this package into it, then "
            f"{install_line(WHEELS)}"
        )
    missing = missing_wheels(installed_wheels() if installed is None else installed)
    if missing:
        names = ", ".join(wheel.name for wheel in missing)
        raise InvalidConfigError(
            f"MaxText's RL trainer needs what is not installed: {names}. Install it by: "
            f"{install_line(missing)}"
        )


if __name__ == "__main__":
    sys.stdout.write(install_line(WHEELS) + "\n")
