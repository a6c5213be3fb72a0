"""Machine code on disk, beside the programs that JAX keeps there. Any thread.

A file begins with a checksum of the rest, since LLVM ends the process over what it cannot read.
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
    """Where the code of a key is kept; None if JAX keeps no programs, or not in a folder.

    Args:
        key: All that the code depends on.
    """
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    if folder is None or "://" in str(folder):
        return None
    name = hashlib.sha256("\0".join(key).encode()).hexdigest()
    return Path(folder) / f"sgljax-native-{name}.o"


def load(path: Path | None) -> bytes | None:
    """What `save` put there; None if nothing, or something else, is there."""
    if path is None:
        return None
    try:
        found = path.read_bytes()
    except OSError:
        return None
    digest, code = found[:_DIGEST_BYTES], found[_DIGEST_BYTES:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def save(path: Path | None, code: bytes) -> None:
    """Keeps code, whole or not at all; a folder that cannot be written is logged."""
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
