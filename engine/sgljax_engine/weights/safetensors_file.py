"""Reads safetensors files tensor by tensor, without mapping them into memory.

If a mapped file is truncated, reading a lost page ends the process with SIGBUS. Here each tensor is
read into its own buffer, so a truncated file is an error like any other.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from sgljax_engine.errors import WeightLoadError

_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
"""NumPy's dtypes by the format's names."""


class StoredTensor(NamedTuple):
    """A tensor's entry in the header; `end` is the first byte behind it."""

    dtype_name: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def dtype(self) -> np.dtype | None:
        """NumPy's dtype; None for an unknown one."""
        return DTYPES.get(self.dtype_name)


class SafetensorsFile:
    """An open file. Not thread-safe.

    `stamp` has identity, size and time of change; equal while nobody writes to the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = _opened(self.path)
        try:
            self.stamp = self._stamp()
            self.tensors = self._read_header(self.num_bytes)
        except BaseException:
            self._file.close()
            raise

    @property
    def num_bytes(self) -> int:
        return self.stamp[2]

    def read(self, name: str) -> np.ndarray:
        """A tensor, unless the file has changed since it was opened."""
        tensor = self.tensors[name]
        if tensor.dtype is None:
            raise WeightLoadError(f"{self.path}: {name!r} is {tensor.dtype_name}, not supported")
        data = np.empty(tensor.end - tensor.start, np.uint8)
        self._read_into(data.data, tensor.start)
        self.check_unchanged(self.stamp)
        return data.view(tensor.dtype).reshape(tensor.shape)

    def read_bytes(self, name: str, start: int, count: int) -> bytearray:
        """At most so many bytes of a tensor, from one of its bytes on; raises as `read`."""
        tensor = self.tensors[name]
        data = bytearray(max(0, min(count, tensor.end - tensor.start - start)))
        self._read_into(memoryview(data), tensor.start + start)
        self.check_unchanged(self.stamp)
        return data

    def check_unchanged(self, stamp: tuple[int, ...]) -> None:
        """Raises WeightLoadError if the file was changed: what was read may be of both versions."""
        if self._stamp() != stamp:
            raise WeightLoadError(
                f"cannot read {self.path}: it was changed while it was read. Write weights to a "
                "new folder, or rename complete files into place"
            )

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def _stamp(self) -> tuple[int, ...]:
        found = os.fstat(self._file.fileno())
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def _read_header(self, num_bytes: int) -> dict[str, StoredTensor]:
        if num_bytes < 8:
            raise self._error(f"{num_bytes} bytes are no header")
        prefix = bytearray(8)
        self._read_into(memoryview(prefix), 0)
        size = int.from_bytes(prefix, "little")
        if size > min(_MAX_HEADER_BYTES, num_bytes - 8):
            raise self._error(f"a header of {size} bytes in a file of {num_bytes}")
        header = bytearray(size)
        self._read_into(memoryview(header), 8)
        try:
            described = json.loads(header.decode("utf-8"))
            tensors = dict(_tensors(described, size + 8))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self._error(f"invalid header: {error}") from error
        end = size + 8
        for tensor in sorted(tensors.values(), key=lambda each: (each.start, each.end)):
            if tensor.start != end:
                raise self._error("its tensors overlap or leave holes")
            end = tensor.end
        if end != num_bytes:
            raise self._error(f"it has {num_bytes} bytes, its header says {end}")
        return tensors

    def _read_into(self, target: memoryview, start: int) -> None:
        try:
            self._file.seek(start)
            filled = 0
            while filled < len(target):
                count = self._file.readinto(target[filled:])
                if not count:
                    raise self._error(f"it ends at byte {start + filled}")
                filled += count
        except OSError as error:
            raise self._error(str(error)) from error

    def _error(self, problem: str) -> WeightLoadError:
        return WeightLoadError(f"cannot read {self.path}: {problem} (truncated download?)")


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """All tensors of a file by name, each read into memory of its own.

    Raises:
        WeightLoadError: for a file that is missing, truncated, or changed while it is read.
    """
    with SafetensorsFile(path) as file:
        return {name: file.read(name) for name in file.tensors}


def _opened(path: Path) -> Any:
    """A regular file, unbuffered; a pipe without a writer would let `open` wait for ever."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _BINARY)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise WeightLoadError(f"no such weights file: {path} is no regular file")
        return os.fdopen(descriptor, "rb", buffering=0)
    except FileNotFoundError:
        raise WeightLoadError(f"no such weights file: {path}") from None
    except OSError as error:
        raise WeightLoadError(f"cannot read {path}: {error}") from error


_BINARY = getattr(os, "O_BINARY", 0)  # Windows


def _tensors(described: Mapping[str, Any], first: int) -> Iterator[tuple[str, StoredTensor]]:
    """Raises what a header of another form leads to; the caller catches it."""
    for name, entry in described.items():
        if name == "__metadata__":
            continue
        shape = tuple(entry["shape"])
        start, end = entry["data_offsets"]
        if any(type(n) is not int or n < 0 for n in (*shape, start, end)):
            raise ValueError(f"{name!r} has shape {list(shape)} at {entry['data_offsets']}")
        tensor = StoredTensor(entry["dtype"], shape, first + start, first + end)
        if tensor.dtype is not None and math.prod(shape) * tensor.dtype.itemsize != end - start:
            raise ValueError(f"{name!r} has shape {list(shape)} in {end - start} bytes")
        yield name, tensor
