"""Arrays in the safetensors format, without the copies that the library makes.

The library joins all tensors in memory to write them, and copies each to read it. A reader here
knows which tensors a file must have, so it compares the header with the one that it expects and
never trusts what a file says of itself.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sgljax_engine.checkpoint.fields import dump_json

_NAMES = {"int32": "I32", "float32": "F32", "float64": "F64", "uint16": "U16", "uint32": "U32"}
_ALIGNMENT = 8


class TensorSpec(NamedTuple):
    """A tensor of a file."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of its contents."""
        return math.prod(self.shape) * self.dtype.itemsize


def header(specs: Sequence[TensorSpec]) -> bytes:
    """What a file with these tensors, in this order, starts with."""
    entries, start = {}, 0
    for spec in specs:
        entries[spec.name] = {
            "dtype": _NAMES[spec.dtype.name],
            "shape": list(spec.shape),
            "data_offsets": [start, start + spec.num_bytes],
        }
        start += spec.num_bytes
    text = dump_json(entries)
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def buffers(tensors: Mapping[str, np.ndarray]) -> Iterator[bytes | memoryview]:
    """The contents of a file; arrays that are C-contiguous and little-endian are not copied."""
    specs = [TensorSpec(name, array.dtype, array.shape) for name, array in tensors.items()]
    yield header(specs)
    for array in tensors.values():
        if array.size:  # memoryview cannot cast empty ones
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            yield np.ascontiguousarray(little).data.cast("B")


def file_size(specs: Sequence[TensorSpec]) -> int:
    """Bytes of a file with these tensors."""
    return len(header(specs)) + sum(spec.num_bytes for spec in specs)


def split(data: np.ndarray, specs: Sequence[TensorSpec]) -> dict[str, np.ndarray] | None:
    """Views of a file's tensors; None if it does not have exactly these.

    Args:
        data: uint8 [file's bytes].
        specs: What the file must hold.
    """
    start = header(specs)
    if len(data) != file_size(specs) or data[: len(start)].tobytes() != start:
        return None
    tensors, offset = {}, len(start)
    for spec in specs:
        end = offset + spec.num_bytes
        little = spec.dtype.newbyteorder("<")
        tensors[spec.name] = data[offset:end].view(little).reshape(spec.shape)
        offset = end
    return tensors
