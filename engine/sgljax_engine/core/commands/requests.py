"""Commands about requests: adding, ending and scoring them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Self

import numpy as np

from sgljax_engine.core.command import Command, PerEngineCommand, Recipients, Task
from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.errors import InvalidRequestError, NonFiniteLogitsError
from sgljax_engine.io_struct import AbortReq
from sgljax_engine.processing.futures import Answer, reject
from sgljax_engine.types import FinishReason, Request


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AddRequests(Command):
    """Queue all requests; or none, if an id is taken or there are no weights."""

    requests: list[Request]
    answers: list[Answer]

    def hand_out(self, group: Recipients) -> None:
        taken = group.groups.add([self.requests])
        if taken:
            for answer in self.answers:
                # An error each: raised on two threads, one would mix up their frames.
                message = f"rid {taken[0]!r} is the id of another request"
                reject(answer.future, InvalidRequestError(message))
            return
        group.route(self.requests)
        parts = [TakeIn([], []) for _ in range(group.num_engines)]
        for request, answer in zip(self.requests, self.answers, strict=True):
            parts[request.engine].requests.append(request)
            parts[request.engine].answers.append(answer)
        for index, part in enumerate(parts):
            if part.requests:
                group.enqueue(index, part)

    def refuse(self, make_error: Callable[[], BaseException]) -> None:
        _refuse(self.answers, make_error)


def _refuse(answers: Sequence[Answer], make_error: Callable[[], BaseException]) -> None:
    for answer in answers:
        reject(answer.future, make_error())


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _RequestsTask(Task):
    """Something about one engine's requests."""

    requests: list[Request]
    answers: list[Answer]

    def refuse(self, make_error: Callable[[], BaseException]) -> None:
        _refuse(self.answers, make_error)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TakeIn(_RequestsTask):
    """Queue an engine's part of a call's requests, which `RequestGroups` has already."""

    def run(self, core: EngineCore) -> None:
        for request, answer in zip(self.requests, self.answers, strict=True):
            try:
                core.check_takes_requests()
                core.check_can_serve(request)
            except Exception as error:  # a refusal, or a bug, which costs this request alone
                core.groups.withdraw(request)
                reject(answer.future, error)
                continue
            core.take_in(request, answer)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TakeOver(_RequestsTask):
    """Queue requests that another engine of the group accepted but did not start."""

    def run(self, core: EngineCore) -> None:
        """Queues all of them, without a check: they had one."""
        for request, answer in zip(self.requests, self.answers, strict=True):
            core.take_in(request, answer)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class EndAnswered(Task):
    """End a request that was answered while it ran: with a stop string, or with an error."""

    request: Request
    reason: FinishReason

    def run(self, core: EngineCore) -> None:
        core.end([self.request], self.reason)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AbandonRequests(PerEngineCommand):
    """End requests that nobody waits for any more; finished ones are no error."""

    requests: list[Request]
    future: Future[int]

    def hand_out(self, group: Recipients) -> None:
        PerEngineCommand.hand_out(self, group)
        group.groups.answered(self.requests)

    def parts(self, num_engines: int) -> list[Self]:
        return [
            dataclasses.replace(self, requests=[r for r in self.requests if r.engine == index])
            for index in range(num_engines)
        ]

    def run(self, core: EngineCore) -> int:
        return core.end(self.requests, FinishReason("abort", message="aborted by the caller"))

    def combine(self, answers: Sequence[int]) -> int:
        return sum(answers)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Abort(PerEngineCommand):
    """End the requests that a caller names; answers with their number."""

    request: AbortReq
    future: Future[int]

    def run(self, core: EngineCore) -> int:
        rid = self.request.rid
        found = core.scheduler.requests() if rid is None else core.find(rid)
        return core.end(found, FinishReason("abort", message=self.request.message))

    def combine(self, answers: Sequence[int]) -> int:
        return sum(answers)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Score(PerEngineCommand):
    """Compute log-probs of token sequences, from each one's start on."""

    sequences: list[list[int]]
    starts: list[int]
    temperature: float
    lora: str | None
    future: Future[list[np.ndarray]]

    def parts(self, num_engines: int) -> list[Self]:
        """Neighbouring sequences for each engine, with about equally many tokens.

        Neighbours often share a prompt, which one engine computes only once.
        """
        lengths = [len(sequence) for sequence in self.sequences]
        total, done = sum(lengths), 0
        parts: list[tuple[list[list[int]], list[int]]] = [([], []) for _ in range(num_engines)]
        for sequence, start, length in zip(self.sequences, self.starts, lengths, strict=True):
            index = min(done * num_engines // max(total, 1), num_engines - 1)
            parts[index][0].append(sequence)
            parts[index][1].append(start)
            done += length
        return [
            dataclasses.replace(self, sequences=sequences, starts=starts)
            for sequences, starts in parts
        ]

    def run(self, core: EngineCore) -> list[np.ndarray]:
        core.check_awake()
        slot = core.serving.adapters.find(self.lora)
        found = core.runner.scorer.score(self.sequences, self.starts, self.temperature, slot)
        core.counters.num_nonfinite_requests += sum(bool(np.isnan(each).any()) for each in found)
        return found

    def combine(self, answers: Sequence[list[np.ndarray]]) -> list[np.ndarray]:
        """Raises NonFiniteLogitsError, which names the first sequence with such log-probs."""
        found = [each for answer in answers for each in answer]
        for index, (each, start) in enumerate(zip(found, self.starts, strict=True)):
            if np.isnan(each).any():
                place = start + int(np.argmax(np.isnan(each)))
                raise NonFiniteLogitsError(
                    f"sequences[{index}] cannot be scored: the logits for its token {place} are "
                    "NaN or infinite"
                )
        return found
