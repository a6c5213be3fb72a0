"""What the threads of the workers see of a group of engines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Protocol, TypeVar

import jax

from sgljax_engine.core import commands as cmd
from sgljax_engine.io_struct import PauseMode

_T = TypeVar("_T")

Split = Callable[[Mapping[str, jax.Array]], list[dict[str, jax.Array]]]
"""Gives each engine its part of weights that were made for all; copies nothing."""


class Engines(Protocol):
    """The engines of a group."""

    @property
    def split(self) -> Split:
        """See `Split`."""
        ...

    def check_open(self) -> None:
        """Raises EngineShutdownError once they are shut down."""
        ...

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Around what a job about weights does with its source alone; see `Worker.reading`."""
        ...

    def ask(self, make: Callable[[Future[_T]], cmd.Command], place: int | None = None) -> _T:
        """Has all of them, or one, do a command, and waits for the answer."""
        ...

    def swap(self, make: Callable[[Future[int]], cmd.Question], mode: PauseMode, name: str) -> int:
        """Has them swap weights or an adapter together; returns the new version.

        `name` is the caller's method, for an error.
        """
        ...
