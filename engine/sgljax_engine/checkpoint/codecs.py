"""How the structures of a checkpoint are stored: each field is annotated with its codec.

`Annotated[int, COUNT]` is all that has to be said of a field; the entries of the dicts and the
arrays of the files follow from it.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, get_args, get_type_hints

from sgljax_engine.checkpoint.fields import Fields, float_array, int_array

INT = ("int32",)
FLOAT = ("float32", "float64")
"""float64 if float32 would change a number."""

PER_TOKEN = "per token"
"""Annotates lists with one entry an output token."""

_T = TypeVar("_T")


class Codec(abc.ABC):
    """How one field is stored in a dict."""

    def entries(self, name: str) -> dict[str, tuple[str, ...]]:
        """The names in the dict, each with the dtypes that its array may have; none for JSON."""
        return {name: ()}

    @abc.abstractmethod
    def write(self, name: str, value: Any, where: str) -> dict[str, Any]:
        """The entries of a field; `where` is what errors call its owner."""

    @abc.abstractmethod
    def read(self, name: str, fields: Fields, known: Mapping[str, Any]) -> Any:
        """The inverse; `known` are the fields that are declared before this one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plain(Codec):
    """One entry, under the field's own name.

    Attributes:
        get: Takes the value from the dict, by its name.
        put: The inverse, from the value and what errors call it.
        dtypes: Those that its array may have; none for JSON.
    """

    get: Callable[[Fields, str], Any]
    put: Callable[[Any, str], Any] = lambda value, where: value
    dtypes: tuple[str, ...] = ()

    def entries(self, name: str) -> dict[str, tuple[str, ...]]:
        """The field's own name, with the dtypes that its array may have."""
        return {name: self.dtypes}

    def write(self, name: str, value: Any, where: str) -> dict[str, Any]:
        """The one entry of a field; `where` is what errors call its owner."""
        return {name: self.put(value, f"{where}: {name}")}

    def read(self, name: str, fields: Fields, known: Mapping[str, Any]) -> Any:
        """The field's value, from its entry."""
        return self.get(fields, name)


ANY = Plain(Fields.value)
TEXT = Plain(Fields.text)
OPTIONAL_TEXT = Plain(Fields.optional_text)
TEXTS = Plain(Fields.texts, lambda values, where: list(values))
FLAG = Plain(Fields.flag)
COUNT = Plain(Fields.count)
SIZE = Plain(lambda fields, name: fields.count(name, low=1))
NUMBER = Plain(Fields.number)
OPTIONAL_NUMBER = Plain(Fields.optional_number)
IDS = Plain(lambda fields, name: fields.ints(name).tolist(), int_array, INT)
FLOATS = Plain(lambda fields, name: fields.floats(name).tolist(), float_array, FLOAT)


@functools.cache
def notes(owner: type, kind: type[_T]) -> dict[str, _T]:
    """The annotations of type `kind` of a dataclass, by field; without fields that have none."""
    hints = get_type_hints(owner, include_extras=True)
    return {
        field.name: note
        for field in dataclasses.fields(owner)
        for note in get_args(hints[field.name])
        if isinstance(note, kind)
    }


@functools.cache
def codecs(owner: type) -> dict[str, Codec]:
    """Codecs of a dataclass, by field. Raises TypeError for a field without one."""
    found = notes(owner, Codec)
    for field in dataclasses.fields(owner):
        if field.name not in found:
            raise TypeError(f"{owner.__name__}.{field.name} is not annotated with its codec")
    return found


@functools.cache
def entries(owner: type) -> dict[str, tuple[str, ...]]:
    """The names in the dict of a dataclass, each with the dtypes that its array may have."""
    found: dict[str, tuple[str, ...]] = {}
    for name, codec in codecs(owner).items():
        found |= codec.entries(name)
    return found


def to_dict(owner: Any, where: str, *, without: Collection[str] = ()) -> dict[str, Any]:
    """All entries of a dataclass, but for some fields; `where` is what errors call it."""
    found: dict[str, Any] = {}
    for name, codec in codecs(type(owner)).items():
        if name not in without:
            found |= codec.write(name, getattr(owner, name), where)
    return found


def from_dict(owner: type[_T], given: object, where: str) -> _T:
    """The inverse of `to_dict`. Raises CheckpointError."""
    fields = Fields(given, where, entries(owner))
    known: dict[str, Any] = {}
    for name, codec in codecs(owner).items():
        known[name] = codec.read(name, fields, known)
    return owner(**known)


def check_numbers(owner: Any, where: str) -> None:
    """Raises CheckpointError unless counts and numbers of a dataclass are such."""
    given = {name: getattr(owner, name) for name in codecs(type(owner))}
    fields = Fields(given, where, given)
    for name, codec in codecs(type(owner)).items():
        if codec in (COUNT, NUMBER, OPTIONAL_NUMBER):
            codec.read(name, fields, given)
