"""One checksum of all weights."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)


class WeightsDigest:
    """One checksum of all weights of a version, computed on first use. Any thread."""

    def __init__(self, checksums: Callable[[], Mapping[str, str]] | None) -> None:
        """Computes nothing yet.

        Args:
            checksums: Computes the weights' checksums; None if the weights are missing. Dropped
                after the call.
        """
        self._checksums = checksums
        self._digest: str | None = None
        self._lock = threading.Lock()

    @property
    def is_made(self) -> bool:
        """Whether it no longer holds weights."""
        return self._checksums is None

    def digest(self) -> str | None:
        """The checksum; None if the weights were missing, or are gone. Waits for the device."""
        with self._lock:
            if self._checksums is not None:
                try:
                    text = json.dumps(dict(self._checksums()), sort_keys=True)
                    self._digest = hashlib.sha256(text.encode()).hexdigest()
                except RuntimeError as error:  # an update with donate=True freed them
                    logger.warning("a checkpoint cannot tell its weights: %s", error)
                self._checksums = None
        return self._digest
