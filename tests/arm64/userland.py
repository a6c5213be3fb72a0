"""An ARM64 userland in a folder: QEMU, Debian's Python, and wheels of the pinned versions.

apt and pip download packages, which are unpacked and not installed, so it takes no rights. It needs
Debian, whose package sources have ARM64 too. By hand, from a checkout:

    python -m tests.arm64.userland -m pytest tests/engine/test_native_linear.py
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "arm64"

_PACKAGES = ("python3", "libstdc++6")
_WHEELS = (
    "hypothesis",
    "jax",
    "jaxtyping",
    "llvmlite",
    "numpy",
    "packaging",
    "pytest",
    "safetensors",
    "tokenizers",
    "tqdm",
    "transformers",
)
_GLIBC = range(17, 37)
"""Minor versions that wheels may ask for; Debian 12 has 2.36."""

_PROCESSOR = """\
processor\t: 0
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc \
dcpop asimddp ssbs
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1
"""
"""What LLVM reads of a Neoverse N1 in /proc/cpuinfo. QEMU would show this processor's."""


def missing() -> str | None:
    """Why there can be no userland here; None if there can."""
    try:
        system = platform.freedesktop_os_release().get("ID")
    except OSError:
        system = None
    if system != "debian" or platform.machine() != "x86_64":
        return f"needs Debian on x86-64, this is {system or sys.platform} on {platform.machine()}"
    return None


def make() -> None:
    """Makes the userland, unless it is there: a minute, 100 MB of downloads and 900 MB of disk.

    Raises:
        subprocess.CalledProcessError: when apt, dpkg-deb or pip fail; they say why.
    """
    made = FOLDER / "made.txt"
    wanted = Path(__file__).read_text() + (ROOT / "constraints.txt").read_text()
    if made.exists() and made.read_text() == wanted:
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    root = FOLDER / "root"
    for name in ("bin", "lib", "sbin"):  # as links, which Debian's packages expect from version 13
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    for package in _download():
        is_arm = not package.name.startswith("qemu-user-static")
        _call("dpkg-deb", "-x", package, root if is_arm else FOLDER / "qemu")
    (root / "proc").mkdir()
    (root / "proc" / "cpuinfo").write_text(_PROCESSOR)
    _install_wheels((root / "usr" / "bin" / "python3").readlink().name.removeprefix("python"))
    made.write_text(wanted)


def _download() -> Sequence[Path]:
    """Has apt download packages and what they need, with state of its own in the folder."""
    state, cache = FOLDER / "apt" / "state", FOLDER / "apt" / "cache"
    (state / "lists" / "partial").mkdir(parents=True)
    (cache / "archives" / "partial").mkdir(parents=True)
    (state / "status").touch()
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures::": "amd64",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "",
        "Dir::State": state,
        "Dir::State::status": state / "status",
        "Dir::Cache": cache,
    }
    apt = ["apt-get", "--quiet", *(f"--option={key}={value}" for key, value in options.items())]
    _call(*apt, "update")
    _call(*apt, "install", "--yes", "--download-only", *_PACKAGES, "qemu-user-static:amd64")
    return sorted((cache / "archives").glob("*.deb"))


def _install_wheels(version: str) -> None:
    """Has pip unpack wheels for the userland's Python."""
    platforms = ["manylinux2014_aarch64", *(f"manylinux_2_{n}_aarch64" for n in _GLIBC)]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    target = ["--target", FOLDER / "site", "--only-binary=:all:", "--python-version", version]
    constraints = ["--constraint", ROOT / "constraints.txt"]
    _call(*pip, *target, *constraints, *(f"--platform={name}" for name in platforms), *_WHEELS)


def _call(*command: str | Path) -> None:
    subprocess.run(command, check=True)


def run(*arguments: str, timeout_s: float | None = None) -> str:
    """Runs the userland's Python in this checkout; returns what it prints.

    Args:
        arguments: Of Python.
        timeout_s: How long it may take; None is as long as it takes.

    Raises:
        subprocess.CalledProcessError: when it fails.
        subprocess.TimeoutExpired: when it takes longer.
    """
    emulator = [FOLDER / "qemu/usr/bin/qemu-aarch64-static", "-cpu", "neoverse-n1"]
    path = os.pathsep.join(map(str, (FOLDER / "site", ROOT, ROOT / "engine")))
    return subprocess.run(
        [*emulator, "-L", FOLDER / "root", FOLDER / "root/usr/bin/python3", *arguments],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout_s,
    ).stdout


if __name__ == "__main__":
    make()
    sys.stdout.write(run(*sys.argv[1:]))
