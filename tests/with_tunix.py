"""Runs tests with a checkout of Tunix in place of the installed release; `make test-tunix`.

Nothing is installed: the checkout comes first on the path of the test process. Packages that it
needs and this environment has in another version are an error, since what fails then says nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
USAGE = "make test-tunix TUNIX=<checkout of Tunix>"

# Finds the package without importing it.
_WHERE = "import importlib.util as u; print(u.find_spec('tunix').origin)"


class CheckoutError(Exception):
    """The folder is no checkout of Tunix that can be tested with; the message says why."""


class Checkout(NamedTuple):
    """A checkout of Tunix.

    Attributes:
        folder: Its root.
        version: As its pyproject.toml has it.
        missing: Packages that it names and this environment does not have. Most serve its examples.
    """

    folder: Path
    version: str
    missing: tuple[str, ...]


def read_checkout(name: str) -> Checkout:
    """Looks at a checkout.

    Raises:
        CheckoutError: for no name, no checkout, or one that needs other packages than there are.
    """
    if not name:
        raise CheckoutError(f"TUNIX is not given: {USAGE}")
    folder = Path(name).expanduser().resolve()
    if not folder.is_dir():
        raise CheckoutError(f"TUNIX={name!r} is no folder: {USAGE}")
    project_file = folder / "pyproject.toml"
    if not (folder / "tunix" / "__init__.py").is_file() or not project_file.is_file():
        raise CheckoutError(
            f"TUNIX={name!r} is no checkout of Tunix: it has no tunix/__init__.py beside a "
            "pyproject.toml"
        )
    project = tomllib.loads(project_file.read_text(encoding="utf-8")).get("project", {})
    if project.get("name") != "google-tunix":
        raise CheckoutError(
            f"TUNIX={name!r} is no checkout of Tunix: its project is {project.get('name')!r}"
        )
    missing, unmet = [], []
    for line in project.get("dependencies", []):
        needed = Requirement(line)
        try:
            version = metadata.version(needed.name)
        except metadata.PackageNotFoundError:
            missing.append(needed.name)
            continue
        if not needed.specifier.contains(version, prereleases=True):
            unmet.append(f"{needed.name}{needed.specifier} (installed: {version})")
    if unmet:
        raise CheckoutError(f"TUNIX={name!r} needs other packages: {', '.join(unmet)}")
    return Checkout(folder, project["version"], tuple(missing))


def environment(checkout: Checkout) -> dict[str, str]:
    """This process's environment with the checkout before everything that is installed.

    Our own packages come first of all: the checkout has folders `tests` and `examples` too.
    """
    paths = [str(ROOT), str(ROOT / "engine"), str(checkout.folder)]
    inherited = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": os.pathsep.join([*paths, *filter(None, [inherited])])}


def imported_from(env: dict[str, str]) -> Path:
    """The folder of the package that `import tunix` takes in this environment."""
    found = subprocess.run(
        [sys.executable, "-c", _WHERE],
        env=env,
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return Path(found.stdout.strip()).parent


def main(arguments: Sequence[str]) -> int:
    """The exit status of pytest, or 2 if it was not run."""
    try:
        checkout = read_checkout(arguments[0] if arguments else "")
        env = environment(checkout)
        folder = imported_from(env)
        if folder != checkout.folder / "tunix":
            raise CheckoutError(f"`import tunix` takes {folder}, not TUNIX={arguments[0]!r}")
    except CheckoutError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(
        f"Tunix {checkout.version} from {folder} (installed: {metadata.version('google-tunix')})\n"
    )
    if checkout.missing:
        sys.stdout.write(f"not installed, of what it names: {', '.join(checkout.missing)}\n")
    sys.stdout.flush()
    return subprocess.run(
        [sys.executable, "-m", "pytest", *arguments[1:]], env=env, cwd=ROOT, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
