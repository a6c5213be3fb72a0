"""One checksum of all weights."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)


class WeightsDigest:
    """One checksum of all weights of a version, made when it is first asked for. Any thread."""

    def __init__(self, checksums: Callable[[], Mapping[str, str]] | None) -> None:
        """Makes nothing yet.

        Args:
            checksums: Makes those of the weights; None if they are not there. Not kept once called.
        """
        self._checksums = checksums
        self._digest: str | None = None
        self._lock = threading.Lock()

    @property
    def is_made(self) -> bool:
        """Whether it holds no weights any more."""
        return self._checksums is None

    def digest(self) -> str | None:
        """The checksum; None if the weights were not there, or are gone. Waits for the device."""
        with self._lock:
            if self._checksums is not None:
                try:
                    text = json.dumps(dict(self._checksums()), sort_keys=True)
                    self._digest = hashlib.sha256(text.encode()).hexdigest()
                except RuntimeError as error:  # an update with donate=True took them apart
                    logger.warning("a checkpoint cannot tell its weights: %s", error)
                self._checksums = None
        return self._digest
