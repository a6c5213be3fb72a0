"""Drafters: where a request's reference sequences come from.

A drafter knows sequences in which a request's last tokens may occur; the device looks them up and
drafts what follows there. It has no weights, so no weight update makes it wrong. Drafters are
shared by the engines of a group, whose threads call them.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from sgljax_engine.speculation.texts import PromptKey, RequestText

_MAX_ANSWERS = 16
"""Answers that are kept of one prompt."""


class Drafter(Protocol):
    """Reference sequences of one kind. Any thread."""

    def add(self, text: RequestText) -> None:
        """A request came, or came to another engine."""
        ...

    def finish(self, text: RequestText, end: End) -> None:
        """A request that was added has ended for its engine."""
        ...

    def references(self, text: RequestText) -> Sequence[np.ndarray]:
        """int32 sequences for a request, the most useful last. Nobody may change them."""
        ...


class End(NamedTuple):
    """How a request ended: moved to another engine, where it is added again, or with an answer.

    `version` is that of the weights that sampled its last token, if it has its whole answer; else
    None.
    """

    is_moved: bool = False
    version: int | None = None


class SiblingDrafter:
    """Other samples of the same prompt, finished or not, while one of them is unfinished.

    The longest ones are the most useful: they may be ahead.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[PromptKey, list[RequestText]] = {}
        self._finished: dict[PromptKey, deque[RequestText]] = {}

    def add(self, text: RequestText) -> None:
        with self._lock:
            self._running.setdefault(text.key, []).append(text)

    def finish(self, text: RequestText, end: End) -> None:
        """Removes a request; keeps its output while others with its prompt are unfinished."""
        key = text.key
        with self._lock:
            running = [other for other in self._running.pop(key) if other is not text]
            finished = self._finished.pop(key, deque(maxlen=_MAX_ANSWERS))
            if not end.is_moved:
                finished.append(text)
            if running:
                self._running[key], self._finished[key] = running, finished

    def references(self, text: RequestText) -> Sequence[np.ndarray]:
        """Outputs of other requests with the prompt, the longest last."""
        with self._lock:
            known = (*self._running.get(text.key, ()), *self._finished.get(text.key, ()))
        others = [other for other in known if other is not text and other.num_output]
        others.sort(key=lambda other: other.num_output)
        return [_around(other.reference, text.num_output) for other in others[-_MAX_ANSWERS:]]


class HistoryDrafter:
    """Answers of earlier calls to the same prompt: of earlier steps and epochs.

    An answer is kept once all samples of its prompt are finished, or as many as are kept of one
    prompt; until then it is a sibling's. The bytes that all keys and answers take are limited: the
    prompt that was answered the longest time ago is forgotten first.
    """

    def __init__(self, max_bytes: int) -> None:
        self._lock = threading.Lock()
        self._max_bytes = max_bytes
        self._answers: OrderedDict[PromptKey, deque[Answer]] = OrderedDict()
        self._num_unfinished: Counter[PromptKey] = Counter()
        self._finished: dict[PromptKey, list[Answer]] = {}
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def add(self, text: RequestText) -> None:
        with self._lock:
            self._num_unfinished[text.key] += 1

    def finish(self, text: RequestText, end: End) -> None:
        with self._lock:
            if end.version is not None and text.num_output:
                answer = Answer(end.version, text.reference.copy())
                self._finished.setdefault(text.key, []).append(answer)
            self._num_unfinished[text.key] -= 1
            is_last = not self._num_unfinished[text.key]
            if is_last:
                del self._num_unfinished[text.key]
            if is_last or len(self._finished.get(text.key, ())) >= _MAX_ANSWERS:
                self._keep(text.key, self._finished.pop(text.key, ()))

    def _keep(self, key: PromptKey, answers: Iterable[Answer]) -> None:
        for answer in answers:
            if key not in self._answers:
                self._answers[key] = deque()
                self._num_bytes += len(key)
            kept = self._answers[key]
            self._answers.move_to_end(key)
            kept.append(answer)
            self._num_bytes += answer.tokens.nbytes
            if len(kept) > _MAX_ANSWERS:
                self._num_bytes -= kept.popleft().tokens.nbytes
        while self._num_bytes > self._max_bytes:
            oldest, dropped = self._answers.popitem(last=False)
            self._num_bytes -= len(oldest) + sum(answer.tokens.nbytes for answer in dropped)

    def references(self, text: RequestText) -> Sequence[np.ndarray]:
        """Earlier answers to the prompt, the newest last."""
        with self._lock:
            answers = list(self._answers.get(text.key, ()))
        return [_around(answer.tokens, text.num_output) for answer in answers]

    def clear(self) -> None:
        with self._lock:
            self._answers.clear()
            self._num_bytes = 0

    def load(self, answers: Mapping[PromptKey, Iterable[Answer]]) -> None:
        """Takes answers by prompt, the oldest first, within the limit of bytes."""
        with self._lock:
            for key, each in answers.items():
                self._keep(key, each)


class Answer(NamedTuple):
    """The end of an earlier prompt and its output, and the weights that sampled its last token."""

    version: int
    tokens: np.ndarray


_BEFORE, _AFTER = 512, 1536
"""Tokens of a reference before and behind the place of the request that may draft from it."""


def _around(reference: np.ndarray, num_output: int) -> np.ndarray:
    """The part of a reference in which a request with so many output tokens may find its place."""
    if len(reference) <= _AFTER:
        return reference
    return reference[max(num_output - _BEFORE, 0) : num_output + _AFTER]
