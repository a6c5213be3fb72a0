"""The file of a prefix cache: `prefix-000003.safetensors`.

Tensors: `parents`, `tokens`, and for each layer `layer.0.k` and `layer.0.v`. The sizes are in the
manifest. The header is made and compared here, since the safetensors library holds all tensors of
a file as `bytes` to write it, and copies each that it reads: pages may be gigabytes.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sgljax_engine.checkpoint.codecs import entries
from sgljax_engine.checkpoint.fields import Fields, dump_json
from sgljax_engine.checkpoint.files import (
    Buffer,
    Compression,
    FileEntry,
    check_file,
    decompress_into,
    opened,
    read_into,
    write_file,
)
from sgljax_engine.checkpoint.prefix import BITS, LayerPages, PrefixCheckpoint, read_kv_shapes
from sgljax_engine.errors import CheckpointError

_ARRAYS = ("parents", "tokens", "pages")
_TYPES = {"int32": "I32", "uint16": "U16", "uint32": "U32"}
_ALIGNMENT = 8


class _Tensor(NamedTuple):
    """Position of a tensor behind the header; `dtype` is little-endian."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def prefix_name(number: int, compression: Compression) -> str:
    """The file that the save with this number writes."""
    return f"prefix-{number:06}.safetensors{'' if compression is None else '.zst'}"


def write_prefix(
    folder: Path, number: int, prefix: PrefixCheckpoint, compression: Compression
) -> tuple[FileEntry, dict[str, Any]]:
    """Writes the arrays, `sync_folder` has to follow; also returns the rest, which is JSON."""
    sizes = prefix.to_dict()
    arrays = {name: sizes.pop(name) for name in _ARRAYS}
    for layer, pair in enumerate(arrays.pop("pages")):
        arrays[f"layer.{layer}.k"], arrays[f"layer.{layer}.v"] = pair
    name = prefix_name(number, compression)
    return write_file(folder, name, _buffers(arrays, _fields(sizes)), compression), sizes


def read_prefix(
    folder: Path, entry: FileEntry, sizes: object, compression: Compression
) -> dict[str, Any]:
    """The dict of a `PrefixCheckpoint`.

    The file is read into memory, not mapped: a page of a mapped file that somebody has cut off ends
    the process with SIGBUS.

    Raises:
        CheckpointError: names the file that is missing, truncated, damaged or inconsistent.
    """
    path = folder / entry.name
    fields = _fields(sizes)
    header, tensors = _layout(fields)
    check_file(folder, entry)
    num_bytes = len(header) + max(tensor.end for tensor in tensors.values())
    data = _contents(path, num_bytes, compression)
    if len(data) != num_bytes or data[: len(header)].tobytes() != header:
        raise CheckpointError(f"{path} does not hold the arrays that the manifest says")
    body = data[len(header) :]
    arrays = {
        name: body[tensor.start : tensor.end].view(tensor.dtype).reshape(tensor.shape)
        for name, tensor in tensors.items()
    }
    own = {name: fields.value(name) for name in _json_names()}
    own |= {name: arrays[name] for name in ("parents", "tokens")}
    pages = [
        LayerPages(arrays[f"layer.{layer}.k"], arrays[f"layer.{layer}.v"])
        for layer in range(len(read_kv_shapes(fields, "kv_shapes")))
    ]
    return own | {"pages": pages}


def _json_names() -> list[str]:
    return [name for name in entries(PrefixCheckpoint) if name not in _ARRAYS]


def _fields(sizes: object) -> Fields:
    """A file's facts in the manifest, checked as far as its layout needs."""
    fields = Fields(sizes, "the manifest's prefix_cache", _json_names())
    if fields.text("dtype") not in BITS:
        raise fields.error("dtype", f"one of {', '.join(BITS)}")
    read_kv_shapes(fields, "kv_shapes")
    return fields


def _layout(fields: Fields) -> tuple[bytes, dict[str, _Tensor]]:
    """Header of a file with these sizes, and its tensors in order."""
    tensors: dict[str, _Tensor] = {}
    end = 0
    for name, dtype, shape in _shapes(fields):
        start, end = end, end + math.prod(shape) * dtype.itemsize
        tensors[name] = _Tensor(dtype, shape, start, end)
    described = {
        name: {"dtype": _TYPES[dtype.name], "shape": list(shape), "data_offsets": [start, end]}
        for name, (dtype, shape, start, end) in tensors.items()
    }
    text = dump_json(described)
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, tensors


def _shapes(fields: Fields) -> Iterator[tuple[str, np.dtype, tuple[int, ...]]]:
    num_nodes, page_size = fields.count("num_nodes"), fields.count("page_size")
    ids, bits = np.dtype("<i4"), BITS[fields.text("dtype")].newbyteorder("<")
    yield "parents", ids, (num_nodes,)
    yield "tokens", ids, (num_nodes, page_size)
    for layer, (num_kv_heads, head_dim) in enumerate(read_kv_shapes(fields, "kv_shapes")):
        page = (num_nodes, num_kv_heads, page_size, head_dim)
        yield f"layer.{layer}.k", bits, page
        yield f"layer.{layer}.v", bits, page


def _buffers(arrays: Mapping[str, np.ndarray], fields: Fields) -> Iterator[Buffer]:
    """The contents of a file; arrays that are C-contiguous and little-endian are not copied."""
    header, tensors = _layout(fields)
    yield header
    for name, tensor in tensors.items():
        if arrays[name].size:  # memoryview cannot cast empty ones
            little = arrays[name].astype(tensor.dtype, copy=False)
            yield np.ascontiguousarray(little).data.cast("B")


def _contents(path: Path, num_bytes: int, compression: Compression) -> np.ndarray:
    """uint8 [num_bytes], or of another length if the file holds another number of bytes."""
    with opened(path) as file:
        if compression is None and os.fstat(file.fileno()).st_size != num_bytes:
            return np.empty(0, np.uint8)
        try:
            data = np.empty(num_bytes, np.uint8)
        except (MemoryError, OverflowError, ValueError) as error:
            raise CheckpointError(f"{path}: no memory for {num_bytes} bytes") from error
        fill = read_into if compression is None else decompress_into
        return data if fill(file, data.data) else data[:0]
