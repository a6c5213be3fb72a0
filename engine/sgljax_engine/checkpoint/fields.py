"""Strict reading of dicts and JSON that come from outside: nothing is converted or ignored."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from sgljax_engine.errors import CheckpointError, unknown_name_message

MAX_COUNT = 2**63 - 1
MAX_TOKEN = 2**31 - 1
"""Token ids and weight versions are int32, as on the device."""

_MAX_DEPTH = 32


class Fields:
    """A dict that must have exactly the given keys; every error names the field and its value."""

    def __init__(self, given: object, where: str, names: Iterable[str]) -> None:
        """Checks the keys; `where` is what errors call the dict."""
        if not isinstance(given, dict):
            raise CheckpointError(f"{where} must be a dict, got {_short(given)}")
        names = list(names)
        for key in given:
            if key not in names:
                raise CheckpointError(f"{where}: {unknown_name_message('field', str(key), names)}")
        missing = [name for name in names if name not in given]
        if missing:
            raise CheckpointError(f"{where} lacks {', '.join(missing)}")
        self.where = where
        self._given = given

    def value(self, name: str) -> Any:
        """The value as given."""
        return self._given[name]

    def error(self, name: str, limit: str) -> CheckpointError:
        """Says what a field must be and what it is."""
        return CheckpointError(
            f"{self.where}.{name} must be {limit}, got {_short(self.value(name))}"
        )

    def text(self, name: str) -> str:
        """A string."""
        value = self.value(name)
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def optional_text(self, name: str) -> str | None:
        """A string or None."""
        return None if self.value(name) is None else self.text(name)

    def flag(self, name: str) -> bool:
        """True or False."""
        value = self.value(name)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def count(self, name: str, low: int = 0, high: int = MAX_COUNT) -> int:
        """An integer in [low, high]."""
        value = self.value(name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(name, f"an integer in [{low}, {high}]")
        return value

    def number(self, name: str) -> float:
        """A finite number, 0 or above."""
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(name, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not 0 <= number < math.inf:
            raise self.error(name, "finite and >= 0")
        return number

    def optional_number(self, name: str) -> float | None:
        """A finite number, 0 or above, or None."""
        return None if self.value(name) is None else self.number(name)

    def list(self, name: str) -> list[Any]:
        """A list of anything."""
        value = self.value(name)
        if not isinstance(value, list):
            raise self.error(name, "a list")
        return value

    def texts(self, name: str) -> list[str]:
        """A list of strings."""
        values = self.list(name)
        if not all(isinstance(value, str) for value in values):
            raise self.error(name, "a list of strings")
        return list(values)

    def ints(self, name: str, *, num_dims: int = 1, low: int = 0) -> np.ndarray:
        """Integers in [low, MAX_TOKEN] as int32."""
        return int_array(self.value(name), f"{self.where}.{name}", num_dims=num_dims, low=low)

    def floats(self, name: str, *, num_dims: int = 1) -> np.ndarray:
        """Numbers as float32 or, if that would change one, float64."""
        return float_array(self.value(name), f"{self.where}.{name}", num_dims=num_dims)


def int_array(values: Any, where: str, *, num_dims: int = 1, low: int = 0) -> np.ndarray:
    """A list or array of integers in [low, MAX_TOKEN] as int32, or a CheckpointError."""
    array = _array(values, where, "iu", "integers", num_dims)
    if array.size and not (low <= array.min() and array.max() <= MAX_TOKEN):
        found = f"[{array.min()}, {array.max()}]"
        raise CheckpointError(f"{where} must be integers in [{low}, {MAX_TOKEN}], got {found}")
    return array.astype(np.int32, copy=False)


def float_array(values: Any, where: str, *, num_dims: int = 1) -> np.ndarray:
    """A list or array of numbers as float32, or float64 if float32 would change one.

    The engine's log-probs were float32 before they were Python numbers.
    """
    array = _array(values, where, "fiu", "numbers", num_dims)
    if array.dtype == np.float32:
        return array
    with np.errstate(over="ignore"):  # found by the comparison
        float32 = array.astype(np.float32)
    same = np.array_equal(float32, array, equal_nan=True)
    return float32 if same else array.astype(np.float64, copy=False)


def _array(values: Any, where: str, kinds: str, what: str, num_dims: int) -> np.ndarray:
    if not isinstance(values, (list, tuple, np.ndarray)):
        raise CheckpointError(f"{where} must be a list or array, got {_short(values)}")
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):  # lists of different lengths
        array = np.empty(1, object)
    if not array.size and array.ndim <= num_dims:  # of an empty list numpy knows neither
        shape = array.shape + (0,) * (num_dims - array.ndim)
        kind = np.float32 if "f" in kinds else np.int32
        return array.astype(kind, copy=False).reshape(shape)
    if array.dtype.kind not in kinds or array.ndim != num_dims:
        raise CheckpointError(
            f"{where} must hold {what} in {num_dims} dimensions, got {_short(values)}"
        )
    return array


def plain_json(value: Any, where: str, depth: int = 0) -> Any:
    """A copy that JSON gives back as it is; tuples become lists, anything else is refused."""
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{where} is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise CheckpointError(f"{where} must have strings as keys, got {_short(key)}")
        return {k: plain_json(v, f"{where}.{k}", depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(each, f"{where}[{i}]", depth + 1) for i, each in enumerate(value)]
    if type(value) is float and not math.isfinite(value):
        raise CheckpointError(f"{where} must be finite, got {value!r}")
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise CheckpointError(f"{where} must be JSON (or a tuple), got {type(value).__name__}")


def dump_json(value: Any) -> bytes:
    """Compact JSON in UTF-8. Strings may hold lone surrogates, as Python's may."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "surrogatepass")


def parse_json(data: bytes | bytearray, where: str) -> Any:
    """The inverse of `dump_json`, or a CheckpointError that names `where`."""
    try:
        return json.loads(data.decode("utf-8", "surrogatepass"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _short(value: object) -> str:
    text = f"{type(value).__name__} {value!r}" if isinstance(value, np.ndarray) else repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
