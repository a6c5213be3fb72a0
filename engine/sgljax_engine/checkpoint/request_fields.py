"""The parts of a request that are JSON objects in a checkpoint, and their inverses."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeVar

from sgljax_engine.checkpoint.fields import Fields
from sgljax_engine.errors import CheckpointError
from sgljax_engine.sampling_params import LogprobOptions, SamplingParams
from sgljax_engine.types import FinishReason, RequestStatus

_FINISH_TYPES: tuple[Literal["stop", "length", "abort", "error"], ...] = (
    "stop",
    "length",
    "abort",
    "error",
)
_ParamsT = TypeVar("_ParamsT", SamplingParams, LogprobOptions)


def non_default(given: SamplingParams | LogprobOptions) -> dict[str, Any]:
    """The fields that differ from their defaults; a JSON object has only strings as keys."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(given):
        value = getattr(given, field.name)
        if repr(value) != repr(field.default):  # tells -0.0 from 0.0
            fields[field.name] = _plain(value)
    return fields


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, dict):
        return {str(key): each for key, each in value.items()}
    return value


def read_params(kind: type[_ParamsT], fields: Fields, name: str) -> _ParamsT:
    """The inverse of `non_default`."""
    known = [field.name for field in dataclasses.fields(kind)]
    given = fields.value(name)
    if isinstance(given, dict):  # what is not there has its default
        Fields(given | {k: None for k in known if k not in given}, f"{fields.where}.{name}", known)
    else:
        raise fields.error(name, "a dict")
    try:
        return kind(**given)
    except (ValueError, OverflowError) as error:  # also of numbers too long to convert
        raise CheckpointError(f"{fields.where}.{name}: {error}") from error


def read_status(fields: Fields) -> RequestStatus:
    """A status by its value."""
    try:
        return RequestStatus(fields.text("status"))
    except ValueError:
        known = ", ".join(status.value for status in RequestStatus)
        raise fields.error("status", f"one of {known}") from None


def read_finish(fields: Fields) -> FinishReason | None:
    """A finish reason, or None, from its `dataclasses.asdict`."""
    if fields.value("finish") is None:
        return None
    names = [field.name for field in dataclasses.fields(FinishReason)]
    finish = Fields(fields.value("finish"), f"{fields.where}.finish", names)
    for kind in _FINISH_TYPES:
        if finish.value("type") == kind:
            matched = finish.value("matched")
            if isinstance(matched, bool) or not isinstance(matched, (int, str, type(None))):
                raise finish.error("matched", "an integer, a string or null")
            return FinishReason(kind, matched, finish.text("message"))
    raise finish.error("type", f"one of {', '.join(_FINISH_TYPES)}")
