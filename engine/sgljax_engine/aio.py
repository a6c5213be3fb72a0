"""Calls of an engine: each is one method that says what to ask, made into two.

`asks` makes the method that waits for the answer, and `twin` the one for asyncio.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from sgljax_engine.core.callers import Callers
from sgljax_engine.core.group import Asked

_P = ParamSpec("_P")
_T = TypeVar("_T")

Asks = Callable[[Future[_T]], Asked]
"""What a method asks the engine's threads for: a command or a job, made with its future.

Callers of the method get the answer, of type T.
"""


class _Asking(Protocol):
    """An object whose methods ask."""

    @property
    def _calls(self) -> Callers: ...


_A = TypeVar("_A", bound=_Asking)


def asks(make: Callable[Concatenate[_A, _P], Asks[_T]]) -> Callable[Concatenate[_A, _P], _T]:
    """The method that asks for what `make` says, and waits for the answer."""

    @functools.wraps(make)
    def ask(self: _A, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self._calls.ask(make(self, *args, **kwargs))

    answer = make.__annotations__["return"].removeprefix("Asks[").removesuffix("]")
    signature = inspect.signature(make).replace(return_annotation=answer)
    ask.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
    return ask


def twin(
    method: Callable[Concatenate[_A, _P], _T],
) -> Callable[Concatenate[_A, _P], Coroutine[Any, Any, _T]]:
    """A method of `asks` for asyncio. Cancelling the task does not undo the call."""
    make: Callable[Concatenate[_A, _P], Asks[_T]] = method.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]

    @functools.wraps(method)
    async def async_ask(self: _A, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return await self._calls.async_ask(make(self, *args, **kwargs))

    async_ask.__doc__ = f"`{method.__name__}` for asyncio."
    async_ask.__name__ = f"async_{method.__name__}"
    async_ask.__qualname__ = f"Engine.{async_ask.__name__}"
    return async_ask
