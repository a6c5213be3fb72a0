"""Names of conversations, so that the turns of one meet the prefix that a worker has of it."""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence

_MAX_PROMPTS = 8192
_MIN_TOKENS = 16
"""Shorter prompts begin others by chance, and leave nothing to compute."""


class Sessions:
    """Finds the session of a prompt: that of the longest earlier prompt that it begins with.

    A prompt that continues none begins a session, which equal prompts share. Any thread.
    """

    def __init__(self, max_prompts: int = _MAX_PROMPTS) -> None:
        self._max_prompts = max_prompts
        self._sessions: OrderedDict[bytes, tuple[int, str]] = OrderedDict()
        self._lengths: dict[int, int] = {}  # of known prompts, with how many have each
        self._lock = threading.Lock()

    def find(self, prompt_ids: Sequence[int], lora: str | None) -> str:
        ids = array("q", prompt_ids)
        own = _digest(ids, lora)
        with self._lock:
            session = self._known(ids, own, lora) or own.hex()
            if own not in self._sessions:
                self._lengths[len(ids)] = self._lengths.get(len(ids), 0) + 1
            self._sessions[own] = (len(ids), session)
            self._sessions.move_to_end(own)
            if len(self._sessions) > self._max_prompts:
                self._forget_oldest()
            return session

    def _known(self, ids: array[int], own: bytes, lora: str | None) -> str | None:
        if own in self._sessions:
            return self._sessions[own][1]
        for length in sorted(self._lengths, reverse=True):
            if _MIN_TOKENS <= length < len(ids):
                found = self._sessions.get(_digest(ids[:length], lora))
                if found is not None:
                    return found[1]
        return None

    def _forget_oldest(self) -> None:
        _, (length, _) = self._sessions.popitem(last=False)
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]


def _digest(ids: array[int], lora: str | None) -> bytes:
    return hashlib.blake2b(ids.tobytes(), digest_size=16, person=_person(lora)).digest()


def _person(lora: str | None) -> bytes:
    return b"" if lora is None else hashlib.blake2b(lora.encode(), digest_size=16).digest()
