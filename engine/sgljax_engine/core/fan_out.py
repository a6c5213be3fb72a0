"""One answer out of those of several engines. Any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from sgljax_engine.core import commands as cmd
from sgljax_engine.errors import EngineError
from sgljax_engine.observability.combined import combine_states
from sgljax_engine.processing.futures import reject, resolve


class Gathered:
    """Answers a caller when all engines have answered: with all answers, or the first error."""

    def __init__(
        self, caller: Future[Any], combine: Callable[[Sequence[Any]], Any], count: int
    ) -> None:
        """Waits for the engines.

        Args:
            caller: Gets the answer.
            combine: Makes it of the engines' answers.
            count: Number of engines.
        """
        self._caller: Future[Any] | None = caller
        self._combine = combine
        self._lock = threading.Lock()
        self._answers: list[Any] = [None] * count
        self._num_missing = count
        self._error: BaseException | None = None

    def future(self, place: int) -> Future[Any]:
        """For the command of one engine."""
        future: Future[Any] = Future()
        future.add_done_callback(lambda done: self._answered(place, done))
        return future

    def _answered(self, place: int, done: Future[Any]) -> None:
        error = done.exception()
        with self._lock:
            if error is None:
                self._answers[place] = done.result()
            self._error = self._error or error
            self._num_missing -= 1
            if self._num_missing:
                return
            caller, answers, error = self._caller, self._answers, self._error
            self._caller, self._answers, self._error = None, [], None
        assert caller is not None
        try:
            if error is not None:
                reject(caller, error)
                return
            try:
                resolve(caller, self._combine(answers))
            except EngineError as contradiction:
                reject(caller, contradiction)
        finally:
            del caller, answers, error, done  # an error refers to this frame


def split_score(command: cmd.Score, count: int) -> list[cmd.Score]:
    """Neighbouring sequences for each engine, of about as many tokens.

    Neighbours often share a prompt, whose computation they share on one engine.
    """
    lengths = [len(sequence) for sequence in command.sequences]
    total, done = sum(lengths), 0
    parts: list[tuple[list[list[int]], list[int]]] = [([], []) for _ in range(count)]
    for sequence, start, length in zip(command.sequences, command.starts, lengths, strict=True):
        sequences, starts = parts[min(done * count // max(total, 1), count - 1)]
        sequences.append(sequence)
        starts.append(start)
        done += length
    return [
        cmd.Score(sequences, starts, command.temperature, command.lora, command.future)
        for sequences, starts in parts
    ]


def _first(answers: Sequence[Any]) -> Any:
    return answers[0]


def _same(answers: Sequence[dict[str, str]]) -> dict[str, str]:
    """The checksums of all engines, which must agree."""
    if any(answer != answers[0] for answer in answers):
        raise EngineError("the engines of the group serve different weights (a bug)")
    return answers[0]


def _chained(answers: Sequence[list[Any]]) -> list[Any]:
    return [each for answer in answers for each in answer]


COMBINED: Mapping[type[cmd.Question], Callable[[Sequence[Any]], Any]] = {
    cmd.AbandonRequests: sum,
    cmd.Abort: sum,
    cmd.Pause: _first,  # of mode "wait"; see `steps.takes_meeting`
    cmd.Continue: _first,
    cmd.Drain: _first,
    cmd.EndDrain: _first,
    cmd.GetState: combine_states,
    cmd.CheckIntegrity: _first,
    cmd.Score: _chained,
    cmd.Warmup: sum,
    cmd.ChecksumWeights: _same,
}
"""Commands that each engine does by itself, and how their answers become one."""
