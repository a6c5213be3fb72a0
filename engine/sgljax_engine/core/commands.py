"""What callers ask of the engine thread. A `Question` carries the future of its answer.

`core.handlers` has the table of what is done for each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Self

import jax
import numpy as np

from sgljax_engine.core.snapshot import CopiedPages, Restoration, Snapshot
from sgljax_engine.errors import forget_locals
from sgljax_engine.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    PauseGenerationReqInput,
    PauseMode,
    SleepTag,
)
from sgljax_engine.observability.metrics import EngineState
from sgljax_engine.observability.progress import ProgressListener
from sgljax_engine.processing.futures import Answer, reject, resolve
from sgljax_engine.types import FinishReason, PageStamp, Request
from sgljax_engine.weights.rules import WeightRule

SHUT_DOWN = "the engine was shut down"
"""What calls are told that come behind the end, or that it interrupts."""

Weights = dict[str, jax.Array]
BuildWeights = Callable[[Sequence[Weights]], Sequence[Mapping[str, jax.Array]]]
"""Makes the new weights of each engine; gets the serving ones, which it may take apart."""


class Command:
    """What the engine thread does between two dispatches.

    Attributes:
        is_part_of_long_job: Whether a step comes before the next command, if there is work.
    """

    __slots__ = ()

    is_part_of_long_job: ClassVar[bool] = False

    def refuse(self, make_error: Callable[[], BaseException]) -> None:
        """Tells those who wait, if anybody does, that nobody will do it."""


class Question(Command):
    """A command with one answer.

    Attributes:
        future: Future of the answer.
    """

    __slots__ = ()

    future: Future[Any]

    def refuse(self, make_error: Callable[[], BaseException]) -> None:
        """Answers it with an error."""
        reject(self.future, make_error())

    def for_future(self, future: Future[Any]) -> Self:
        """The same question for another caller."""
        return dataclasses.replace(self, future=future)  # type: ignore[type-var]


def answer(command: Question, act: Callable[[], Any]) -> None:
    """Hands a result to the command's caller, or the error: they asked for it.

    An error refers to this frame, and through it to those of its callers. None of them may refer to
    the command: its future refers to the error, and it may hold weights.
    """
    future: Future[Any] = command.future
    try:
        result = act()
    except BaseException as error:  # a user's hook may raise anything
        forget_locals(error)
        reject(future, error)
    else:
        resolve(future, result)
    finally:
        del command, future, act


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AddRequests(Command):
    """Queue requests together; `answers[i]` gets the output of `requests[i]`.

    Attributes:
        requests, answers: In the caller's order.
        are_known: Whether `RequestGroups` has them already, as part of a larger call.
    """

    requests: list[Request]
    answers: list[Answer]
    are_known: bool = False

    def refuse(self, make_error: Callable[[], BaseException]) -> None:
        """Answers each request with an error of its own."""
        for answer in self.answers:
            reject(answer.future, make_error())


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TakeOver(AddRequests):
    """Queue requests that another engine of the group had accepted, and not started."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AbandonRequests(Question):
    """End requests that nobody waits for any more; finished ones are no error."""

    requests: list[Request]
    future: Future[int]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Abort(Question):
    """End the requests that a caller names; answers with their number."""

    request: AbortReq
    future: Future[int]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class EndAnswered(Question):
    """End a request that was answered while it ran: with a stop string, or with an error."""

    request: Request
    reason: FinishReason
    future: Future[int]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Pause(Question):
    """Stop generating; answered once nothing runs on the device."""

    request: PauseGenerationReqInput
    future: Future[None]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Continue(Question):
    """Go on generating."""

    request: ContinueGenerationReqInput
    future: Future[None]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FlushCache(Question):
    """Empty the prefix cache."""

    request: FlushCacheReqInput
    future: Future[FlushCacheReqOutput]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ReleaseKV(Question):
    """Give the memory of the KV cache back; answers with its bytes."""

    future: Future[int]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Sleep(Question):
    """Give the devices' memory back; answers with its bytes.

    Attributes:
        level: 1 keeps the weights on the host, 2 gives them up.
        preserve_state: Keep weights, KV pages and prefix cache on the host, whatever the level.
        refuse_requests: Refuse requests that come; else they wait.
        future: Future of the answer.
    """

    level: int
    preserve_state: bool
    refuse_requests: bool
    future: Future[int]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class WakeUp(Question):
    """Take the memory of these tags again; answers with its bytes."""

    tags: tuple[SleepTag, ...]
    future: Future[int]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SwapWeights(Question):
    """Serve other weights; answers with the new weight version.

    Attributes:
        build: Makes them, or hands over those that were made already.
        mode: What becomes of requests that have started.
        flush_cache: Refuse if keys and values of the old weights would be used on.
        future: Future of the answer.
    """

    build: BuildWeights
    mode: PauseMode
    flush_cache: bool
    future: Future[int]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Drain(Question):
    """Let started requests finish and start no others until a swap, or `EndDrain`.

    This is how engines wait for a swap with mode "wait".

    Attributes:
        name: The caller's method, for an error.
        future: Future of the answer.
    """

    name: str
    future: Future[None]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class EndDrain(Question):
    """Start requests again after a `Drain` that no swap follows."""

    future: Future[None]


BuildAdapter = Callable[[Sequence[Weights], int], Sequence[Weights]]
"""(A and B by name that serve in each engine, slot) -> the same with an adapter in its slot."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SwapAdapter(Question):
    """Serve an adapter, a new one or in the place of one with its name.

    Attributes:
        name: Of the adapter.
        build: Puts it into its slot.
        mode, flush_cache, future: As of `SwapWeights`.
    """

    name: str
    build: BuildAdapter
    mode: PauseMode
    flush_cache: bool
    future: Future[int]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CompareAdapter(Question):
    """Names of projections whose adapter differs from what a source makes of it.

    `build` is as of `SwapAdapter`.
    """

    name: str
    build: BuildAdapter
    future: Future[list[str]]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class UnloadAdapter(Question):
    """Give an adapter's slot back."""

    name: str
    future: Future[None]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Run(Question):
    """Call a function once, while no engine dispatches; answers with its result."""

    function: Callable[[], Any]
    future: Future[Any]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ChecksumWeights(Question):
    """Checksums of the serving weights by name."""

    future: Future[dict[str, str]]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CompareWeights(Question):
    """Names of serving weights whose bits differ from those of a mapped source."""

    source: Any
    rules: Sequence[WeightRule]
    future: Future[list[str]]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TakeSnapshot(Question):
    """Note what belongs into a checkpoint, KV pages too if they belong there; for each engine."""

    include_kv: bool
    future: Future[list[Snapshot]]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CopyPages(Question):
    """Copy the first of these KV pages to the host, as many as take little time."""

    is_part_of_long_job: ClassVar[bool] = True

    stamps: Sequence[PageStamp]
    future: Future[CopiedPages]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Restore(Question):
    """Take in the requests of a checkpoint; all or none.

    Attributes:
        restoration: What all engines take together.
        num_engines: How many there are.
        future: Future of the answer.
    """

    restoration: Restoration
    num_engines: int
    future: Future[None]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Score(Question):
    """Log-probs of given token sequences, from each one's start on."""

    sequences: list[list[int]]
    starts: list[int]
    temperature: float
    lora: str | None
    future: Future[list[np.ndarray]]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Warmup(Question):
    """Compile every bucket; answers with the number of new programs."""

    include_score: bool
    include_table: bool
    progress: ProgressListener | None
    future: Future[int]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GetState(Question):
    """One consistent look at the engine."""

    future: Future[EngineState]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CheckIntegrity(Question):
    """Fail with EngineError if the book-keeping contradicts itself."""

    future: Future[None]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Shutdown(Command):
    """Fail what is unfinished and end the thread."""
