"""Counts what JAX compiles, and keeps it: one cache for all tests, processes and runs."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import jaxlib.version
from jax._src import lru_cache

from tests.site.sitecustomize import write_whole

SITE = Path(__file__).with_name("site")
_MAX_BYTES = 4 << 30
_SUFFIXES = (lru_cache._CACHE_SUFFIX, ".o")
"""Names of programs and of kernels end so; temporary files, about to be renamed, do not."""
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
"""Recorded for every new program, also when the compilation cache then has its executable."""


def _processor() -> str:
    """A digest of what this machine's processor can do, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "any"
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(flags.encode()).hexdigest()[:8]


CACHE = (
    Path(__file__).parents[1]
    / ".cache"
    / f"programs-{jax.__version__}-{jaxlib.version.__version__}-{_processor()}"
)
"""The compilation cache of all tests, kept between runs.

JAX's keys hold the program, its options and jaxlib's version; those of the JIT-compiled CPU kernels
hold the LLVM code, the processor and LLVM's version. So a changed program or kernel is another
entry. The folder's name keeps out a cache that was made on another machine.
"""


def keep_programs() -> None:
    """Has this process, and those that it starts, keep programs in `CACHE`; before any is made."""
    write_whole(lru_cache)
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(SITE) not in others:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(SITE), *filter(None, others)])
    jax.config.update("jax_compilation_cache_dir", str(CACHE))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def prune() -> None:
    """Forgets the oldest programs beyond 4 GiB, of all versions and processors."""
    sized = []
    for path in CACHE.parent.glob("programs-*/*"):
        if not path.name.endswith(_SUFFIXES):
            continue
        with contextlib.suppress(FileNotFoundError):  # another run prunes too
            stat = path.stat()
            sized.append((stat.st_mtime, stat.st_size, path))
    sized.sort()
    excess = sum(size for _, size, _ in sized) - _MAX_BYTES
    for _, size, path in sized:
        if excess <= 0:
            return
        path.unlink(missing_ok=True)
        excess -= size


@contextlib.contextmanager
def recorded_programs() -> Iterator[list[float]]:
    """Collects the lowering seconds of every program that is new to the process, any thread's."""
    lowered: list[float] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _LOWERED:
            lowered.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield lowered
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
