"""Compiled kernels on disk, beside JAX's compilation cache. Any thread.

A file begins with a checksum of the rest, since LLVM ends the process on a file that it cannot
read.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

import jax

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 32


def path_of(*key: str) -> Path | None:
    """Path of the code for a key; None if JAX keeps no programs, or not in a folder.

    Args:
        key: Everything that the code depends on.
    """
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    if not folder or "://" in str(folder):
        return None
    name = hashlib.sha256("\0".join(key).encode()).hexdigest()
    return Path(folder) / f"sgljax-native-{name}.o"


def load(path: Path | None) -> bytes | None:
    """The code that `save` wrote; None if the file is missing or invalid."""
    if path is None:
        return None
    try:
        found = path.read_bytes()
    except OSError:
        return None
    digest, code = found[:_DIGEST_BYTES], found[_DIGEST_BYTES:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def save(path: Path | None, code: bytes) -> None:
    """Writes code atomically; logs a folder that cannot be written."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(hashlib.sha256(code).digest() + code)
                file.flush()
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)
                raise
    except OSError as error:
        logger.warning("machine code cannot be kept in %s: %s", path.parent, error)
