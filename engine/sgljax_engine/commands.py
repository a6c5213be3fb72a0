"""What callers ask of the engine thread. Each command carries the future of its answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from sgljax_engine.detokenizer import Answer
from sgljax_engine.metrics import EngineState
from sgljax_engine.types import FinishReason, Request
from sgljax_engine.weights.rules import Rule


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AddRequests:
    """Queue requests together; `answers[i]` gets the output of `requests[i]`."""

    requests: list[Request]
    answers: list[Answer]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AbortRequests:
    """End requests with finish reason `abort` and what they have; unknown ids are no error."""

    rids: list[str]
    future: Future[int]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class EndAnswered:
    """End a request that was answered while it ran: with a stop string, or with an error."""

    rid: str
    reason: FinishReason
    future: Future[int]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class UpdateWeights:
    """Swap in new weights; answers with the new weight version."""

    source: Any
    rules: Sequence[Rule]
    future: Future[int]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Score:
    """Log-probs of given token sequences, from each one's second token on."""

    sequences: list[list[int]]
    temperature: float
    future: Future[list[np.ndarray]]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Warmup:
    """Compile every bucket; answers with the number of new programs."""

    include_score: bool
    include_table: bool
    future: Future[int]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GetState:
    """One consistent look at the engine."""

    future: Future[EngineState]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FlushCache:
    """Empty the prefix cache; answers with the number of KV tokens freed."""

    future: Future[int]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CheckIntegrity:
    """Fail with EngineError if the book-keeping contradicts itself."""

    future: Future[None]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Shutdown:
    """Fail what is unfinished and end the thread."""


Command = (
    AddRequests
    | AbortRequests
    | EndAnswered
    | UpdateWeights
    | Score
    | Warmup
    | GetState
    | FlushCache
    | CheckIntegrity
    | Shutdown
)
