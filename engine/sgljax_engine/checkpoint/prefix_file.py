"""The file of a prefix cache: `prefix-000003.safetensors`.

Tensors: `parents`, `tokens`, and for each layer `layer.0.k` and `layer.0.v`. The sizes are in the
manifest.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sgljax_engine.checkpoint import tensors
from sgljax_engine.checkpoint.fields import Fields
from sgljax_engine.checkpoint.files import (
    Compression,
    FileEntry,
    check_file,
    decompress_into,
    opened,
    write_file,
)
from sgljax_engine.checkpoint.prefix import BITS, LayerPages, PrefixCheckpoint
from sgljax_engine.checkpoint.tensors import TensorSpec
from sgljax_engine.errors import CheckpointError

_ARRAYS = ("parents", "tokens", "pages")
_SIZES = ("page_size", "num_layers", "num_kv_heads", "head_dim", "num_nodes")
_MAX_LAYERS = 1 << 16


def prefix_name(number: int, compression: Compression) -> str:
    """The file that the save with this number writes."""
    return f"prefix-{number:06}.safetensors{'' if compression is None else '.zst'}"


def write_prefix(
    folder: Path, number: int, prefix: PrefixCheckpoint, compression: Compression
) -> tuple[FileEntry, dict[str, Any]]:
    """Writes the arrays, `sync_folder` has to follow; also returns the rest, which is JSON."""
    sizes = prefix.to_dict()
    arrays = {name: sizes.pop(name) for name in _ARRAYS[:2]}
    for layer, pair in enumerate(sizes.pop("pages")):
        arrays[f"layer.{layer}.k"], arrays[f"layer.{layer}.v"] = pair
    name = prefix_name(number, compression)
    return write_file(folder, name, tensors.buffers(arrays), compression), sizes


def read_prefix(
    folder: Path, entry: FileEntry, sizes: object, compression: Compression
) -> dict[str, Any]:
    """The dict of a `PrefixCheckpoint`. An uncompressed file is mapped, not read into memory.

    Raises:
        CheckpointError: names the file that is missing, truncated, damaged or inconsistent.
    """
    path = folder / entry.name
    fields = Fields(sizes, "the manifest's prefix_cache", ("dtype", *_SIZES))
    if fields.text("dtype") not in BITS:
        raise fields.error("dtype", f"one of {', '.join(BITS)}")
    fields.count("num_layers", low=1, high=_MAX_LAYERS)
    specs = list(_specs(fields))
    check_file(folder, entry)
    arrays = tensors.split(_contents(path, tensors.file_size(specs), compression), specs)
    if arrays is None:
        raise CheckpointError(f"{path} does not hold the arrays that the manifest says")
    pages = [
        LayerPages(arrays[f"layer.{layer}.k"], arrays[f"layer.{layer}.v"])
        for layer in range(fields.count("num_layers"))
    ]
    own = {name: fields.value(name) for name in ("dtype", *_SIZES)}
    return own | {"parents": arrays["parents"], "tokens": arrays["tokens"], "pages": pages}


def _specs(fields: Fields) -> Iterator[TensorSpec]:
    num_nodes, page_size = fields.count("num_nodes"), fields.count("page_size")
    heads, head_dim = fields.count("num_kv_heads"), fields.count("head_dim")
    yield TensorSpec("parents", np.dtype(np.int32), (num_nodes,))
    yield TensorSpec("tokens", np.dtype(np.int32), (num_nodes, page_size))
    for layer in range(fields.count("num_layers")):
        for name in ("k", "v"):
            shape = (num_nodes, heads, page_size, head_dim)
            yield TensorSpec(f"layer.{layer}.{name}", BITS[fields.text("dtype")], shape)


def _contents(path: Path, num_bytes: int, compression: Compression) -> np.ndarray:
    """uint8 [num_bytes], or of another length if the file holds another number of bytes."""
    with opened(path) as file:
        if compression is None:
            return np.memmap(file, np.uint8, mode="r")
        try:
            data = np.empty(num_bytes, np.uint8)
        except (MemoryError, OverflowError, ValueError) as error:
            raise CheckpointError(f"{path}: no memory for {num_bytes} bytes") from error
        return data if decompress_into(file, data.data) else data[:0]
