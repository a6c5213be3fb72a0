"""Lets one process at a time write to a checkpoint's folder."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from sgljax_engine.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

logger = logging.getLogger(__name__)

_LOCK_NAME = ".lock"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder, which the system releases when the process dies.

    The folder itself is locked. Network file systems lock only files that are open for writing:
    there a file is locked, which stays, since two processes could hold two files of one name.

    Raises:
        CheckpointError: another process, or another engine of this one, holds the lock.
        OSError: the folder cannot be opened.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not _take(descriptor, folder):
            os.close(descriptor)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(folder / _LOCK_NAME, flags, 0o600)
            if not _take(descriptor, folder):
                logger.warning("%s cannot be locked: only one engine may save there", folder)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, folder: Path) -> bool:
    """Whether the file system has locks for this."""
    assert fcntl is not None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(
            f"cannot save a checkpoint in {folder}: another process or engine is saving one there. "
            "Each engine needs a folder of its own"
        ) from None
    except OSError:
        return False
    return True
