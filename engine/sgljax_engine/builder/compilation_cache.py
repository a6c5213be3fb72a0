"""The folder of compiled programs."""

from __future__ import annotations

from pathlib import Path

import jax

_JAX_MIN_COMPILE_S, _MIN_COMPILE_S = 1.0, 0.1
"""Seconds of compilation from which on a program is worth a file: JAX's default, and ours.

Most of an engine's programs compile in less than JAX's."""


def compilation_cache_path(folder: str | None) -> Path | None:
    """Folder in which `enable_compilation_cache` keeps programs; None for none."""
    configured = getattr(jax.config, "jax_compilation_cache_dir", None)
    if folder is None or folder == "auto":
        if configured is not None:
            return Path(configured) if configured else None  # "" is JAX's way to have none
        return None if folder is None else Path.home() / ".cache" / "tunix_sgljax" / "xla"
    return Path(folder)


def enable_compilation_cache(folder: str | None) -> None:
    """Turns on JAX's persistent compilation cache for this process.

    It then keeps what compiles in 0.1 s, of the host process too, unless that has changed JAX's
    limit of 1 s. A cache that the process has configured is left as it is. "auto" is a folder in
    the user's cache directory.
    """
    configured = getattr(jax.config, "jax_compilation_cache_dir", None)
    if folder is None or (folder == "auto" and configured is not None):
        return
    path = compilation_cache_path(folder)
    from jax.experimental.compilation_cache import compilation_cache

    # JAX decides once, at the first compilation, whether to use a cache: decide again.
    compilation_cache.reset_cache()
    compilation_cache.set_cache_dir(str(path))
    limit = "jax_persistent_cache_min_compile_time_secs"
    if getattr(jax.config, limit) == _JAX_MIN_COMPILE_S:
        jax.config.update(limit, _MIN_COMPILE_S)
