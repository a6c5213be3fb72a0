"""What a version stores of each tensor, and the files that hold it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sgljax_engine.errors import WeightStoreError
from sgljax_engine.fleet.deltas import TensorDelta
from sgljax_engine.fleet.files import StoreFiles
from sgljax_engine.fleet.manifest import FileEntry, Form, TensorEntry, dump, layout
from sgljax_engine.weights.safetensors_file import DTYPES

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""Names in safetensors files of NumPy's dtypes."""


class Change(NamedTuple):
    """A tensor of a new version, and what is stored of it."""

    entry: TensorEntry
    delta: TensorDelta

    @property
    def buffers(self) -> list[np.ndarray]:
        """What is stored, in the order of `layout`."""
        return [*self.delta.values, *self.delta.codes]


def write_file(files: StoreFiles, version: int, index: int, changes: Sequence[Change]) -> FileEntry:
    """Writes tensors, all whole or all sparse, as a version's file of this index."""
    header, parts = layout([change.entry for change in changes])
    is_sparse = changes[0].entry.form == "sparse"
    digest = hashlib.sha256()

    def buffers() -> Iterator[memoryview]:
        arrays = [np.frombuffer(header, np.uint8)]
        arrays += [buffer for change in changes for buffer in change.buffers]
        for array in arrays:
            data = array.view(np.uint8)
            if is_sparse:
                digest.update(data.data)
            yield data.data

    name = f"{index:05}.safetensors"
    files.write(files.path(version, name), buffers())
    num_bytes = parts[-1].end
    sha256 = digest.hexdigest() if is_sparse else None
    return FileEntry(name=name, num_bytes=num_bytes, sha256=sha256)


def assign_files(
    changes: Sequence[Change], max_bytes: int
) -> tuple[list[Change], list[list[Change]]]:
    """The changes with the indices of their files, and those of each file."""
    placed: list[Change] = []
    groups: list[list[Change]] = []
    open_files: dict[Form, tuple[int, int]] = {}  # index and bytes of the last file of a form
    for change in changes:
        form = change.entry.form
        if form != "same":
            size = sum(buffer.nbytes for buffer in change.buffers)
            index, filled = open_files.get(form, (-1, 0))
            if index < 0 or filled + size > max_bytes:
                index, filled = len(groups), 0
                groups.append([])
            open_files[form] = (index, filled + size)
            change = change._replace(entry=dataclasses.replace(change.entry, file=index))
            groups[index].append(change)
        placed.append(change)
    return placed, groups


def checked(name: str, array: np.ndarray) -> np.ndarray:
    """A tensor in C order, if the files can hold it."""
    if not isinstance(name, str) or name == "__metadata__":
        raise WeightStoreError(f"a tensor cannot be called {name!r}")
    if not isinstance(array, np.ndarray):
        raise WeightStoreError(f"{name!r} must be a NumPy array, got {type(array).__name__}")
    if array.dtype not in DTYPE_NAMES:
        raise WeightStoreError(
            f"{name!r} has dtype {array.dtype}, supported: {', '.join(map(str, DTYPE_NAMES))}"
        )
    return np.asarray(array, order="C")


def plain(adapter: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """An adapter's config as JSON returns it."""
    if adapter is None:
        return None
    try:
        return json.loads(dump(dict(adapter)))
    except (TypeError, ValueError) as error:
        raise WeightStoreError(f"adapter must be plain JSON: {error}") from error
