"""Child processes with simulated devices: JAX fixes the number of devices at start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import quick_compile
from tests.compilation import CACHE
from tests.threads import LIMIT_S

ROOT = Path(__file__).parents[1]
CACHE_VARIABLES = {
    "JAX_COMPILATION_CACHE_DIR": str(CACHE),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
"""The compilation cache of all tests, as conftest has it."""

_COUNT_FLAG = "--xla_force_host_platform_device_count"


def device_variables(num_devices: int, *, as_users: bool = False) -> dict[str, str]:
    """The environment of a process with this many simulated CPU devices.

    It is this process's own, with other XLA flags as they are. The repository's packages and
    examples come first on the path, and programs are kept in the tests' compilation cache.

    Programs of one device are compiled as those of the module that asks. Those of several are
    optimised little, unless `as_users`: how devices share a program is decided before that, and
    only tests run on simulated devices.
    """
    others = [
        flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_COUNT_FLAG)
    ]
    flags = [*others, f"{_COUNT_FLAG}={num_devices}"]
    is_quick = quick_compile.is_on() or (num_devices > 1 and not as_users)
    paths = [str(ROOT), str(ROOT / "engine"), str(ROOT / "examples")]
    inherited = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        **CACHE_VARIABLES,
        "XLA_FLAGS": " ".join(flags),
        **(quick_compile.variables(flags) if is_quick else {}),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [inherited])]),
    }


def run_python(
    *arguments: object,
    num_devices: int,
    as_users: bool = False,
    folder: Path = ROOT,
    limit_s: float = LIMIT_S,
    python: str | Path = sys.executable,
) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments on simulated devices, until it has ended well.

    Args:
        arguments: What follows `python` on a command line, such as "-m" and a module.
        num_devices: How many devices JAX has there.
        as_users: Whether programs of several devices are compiled as users compile them.
        folder: Where it runs.
        limit_s: After which it counts as hung.
        python: The interpreter.

    Raises:
        AssertionError: Its exit status is not 0; with all that it wrote.
    """
    done = subprocess.run(
        [str(python), *map(str, arguments)],
        cwd=folder,
        env=device_variables(num_devices, as_users=as_users),
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done
