"""Codecs of the parts of a request that are JSON objects in a checkpoint."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, get_args, get_type_hints

from sgljax_engine.checkpoint.codecs import Plain
from sgljax_engine.checkpoint.fields import Fields
from sgljax_engine.errors import CheckpointError
from sgljax_engine.sampling_params import LogprobOptions, SamplingParams
from sgljax_engine.types import FinishReason, RequestStatus

_ParamsT = TypeVar("_ParamsT", SamplingParams, LogprobOptions)


def _non_default(given: SamplingParams | LogprobOptions, where: str) -> dict[str, Any]:
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


def _read_params(kind: type[_ParamsT], fields: Fields, name: str) -> _ParamsT:
    """The inverse of `_non_default`."""
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


def _read_status(fields: Fields, name: str) -> RequestStatus:
    """A status by its value."""
    try:
        return RequestStatus(fields.text(name))
    except ValueError:
        known = ", ".join(status.value for status in RequestStatus)
        raise fields.error(name, f"one of {known}") from None


def _read_finish(fields: Fields, name: str) -> FinishReason | None:
    """A finish reason, or None, from its `dataclasses.asdict`."""
    if fields.value(name) is None:
        return None
    names = [field.name for field in dataclasses.fields(FinishReason)]
    finish = Fields(fields.value(name), f"{fields.where}.{name}", names)
    kinds = get_args(get_type_hints(FinishReason)["type"])
    if finish.value("type") not in kinds:
        raise finish.error("type", f"one of {', '.join(kinds)}")
    matched = finish.value("matched")
    if isinstance(matched, bool) or not isinstance(matched, (int, str, type(None))):
        raise finish.error("matched", "an integer, a string or null")
    return FinishReason(finish.value("type"), matched, finish.text("message"))


PARAMS = Plain(lambda fields, name: _read_params(SamplingParams, fields, name), _non_default)
OPTIONS = Plain(lambda fields, name: _read_params(LogprobOptions, fields, name), _non_default)
STATUS = Plain(_read_status, lambda status, where: status.value)
FINISH = Plain(
    _read_finish, lambda finish, where: None if finish is None else dataclasses.asdict(finish)
)
