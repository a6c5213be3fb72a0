"""Users' reward functions: what they are called with, and what they return, with their names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sgljax_engine import InvalidConfigError

RewardFunction = Callable[..., Any]


def name_of(function: RewardFunction) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def checked(function: RewardFunction) -> RewardFunction:
    """The function, whose errors and wrong results name it. It returns a list of floats.

    Tunix's learners take the function's signature and name, which stay.
    """

    @functools.wraps(function)
    def call(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        rewards = called(function, prompts=prompts, completions=completions, **columns)
        return to_list(function, rewards, len(completions))

    call.__name__ = name_of(function)
    return call


def all_checked(functions: Any) -> Any:
    if functions is None:
        return None
    if isinstance(functions, Sequence):
        return [checked(function) for function in functions]
    return checked(functions)


def called(function: RewardFunction, **arguments: Any) -> Any:
    """The result of a call; an error gets a note with the function's name."""
    try:
        return function(**arguments)
    except Exception as error:
        error.add_note(f"raised in the reward function {name_of(function)}")
        raise


def to_list(
    function: RewardFunction, rewards: Any, count: int, *, may_be_open: bool = False
) -> list[Any]:
    """Rewards as floats, one for each completion."""
    name = f"the reward function {name_of(function)} must return {count} numbers"
    if may_be_open:
        name += " or None"
    is_many = isinstance(rewards, Iterable) and not isinstance(rewards, (str, bytes, Mapping))
    if not is_many or getattr(rewards, "ndim", 1) == 0:  # arrays of NumPy, JAX and others
        raise InvalidConfigError(f"{name}, a list of them, got {rewards!r:.80}")
    values = list(rewards)
    if len(values) != count:
        raise InvalidConfigError(f"{name}, got {len(values)}")
    found = []
    for number, value in enumerate(values):
        if value is None and may_be_open:
            found.append(None)
            continue
        try:
            if isinstance(value, (str, bytes)):
                raise TypeError
            found.append(float(np.asarray(value).item()))
        except (TypeError, ValueError):
            raise InvalidConfigError(f"{name}, got {value!r:.80} for completion {number}") from None
    return found


def find_wrong_call(
    function: RewardFunction, given: Collection[str], optional: Collection[str] = ()
) -> str | None:
    """What is wrong with calling a function by these keywords; None if it can be called."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have none
        return None
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = {each.name for each in parameters if each.kind in by_keyword}
    needed = [
        each.name
        for each in parameters
        if each.default is inspect.Parameter.empty
        and each.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        and (each.kind not in by_keyword or each.name not in {*given, *optional})
    ]
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    refused = [] if takes_all else sorted(set(given) - names)
    if not needed and not refused:
        return None
    problems = [f"it needs {needed}, which it is not given"] if needed else []
    problems += [f"it does not take {refused}: add **columns"] if refused else []
    return f"{name_of(function)} is called with the keywords {sorted(given)}; " + "; ".join(
        problems
    )
