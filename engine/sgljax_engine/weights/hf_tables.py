"""Tables of embeddings and of the output projection: one for both, or two.

A config may tie them where weights have two: then transformers 5 keeps both, if they differ. Where
one is stored it serves as both, whichever it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sgljax_engine.errors import WeightLoadError, WeightSyncError
from sgljax_engine.weights.hf_layout import find_weight_files
from sgljax_engine.weights.safetensors_file import SafetensorsFile

TEXT_PREFIXES = (
    "model.",
    "",
    "language_model.model.",
    "model.language_model.",
    "model.language_model.model.",
    "language_model.",
)
"""What the language model's names may begin with: first as transformers saves a text model, then
as it saves one without its head; the others are of multimodal models, in files and in memory."""

HEADS = ("lm_head.weight", "language_model.lm_head.weight")
TABLES = tuple(f"{prefix}embed_tokens.weight" for prefix in TEXT_PREFIXES)

_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_PIECE = 1 << 24
"""Bytes that are compared at once."""


def holds_two_tables(folder: str | Path) -> bool:
    """Whether a folder stores both tables, with different values.

    False for a folder without weights, or with files that cannot be read.
    """
    with contextlib.suppress(WeightLoadError), contextlib.ExitStack() as stack:
        files = find_weight_files(folder)
        paths = [path for path in map(files.folder.joinpath, files.names) if path.is_file()]
        found: dict[str, SafetensorsFile] = {}
        for path in paths:
            file = stack.enter_context(SafetensorsFile(path))
            found |= dict.fromkeys(file.tensors, file)
        head, table = (_first(names, found) for names in (HEADS, TABLES))
        if head is not None and table is not None:
            return not _are_same(found[head], head, found[table], table)
    return False


def _first(names: tuple[str, ...], found: Mapping[str, Any]) -> str | None:
    return next((name for name in names if name in found), None)


def _are_same(a: SafetensorsFile, a_name: str, b: SafetensorsFile, b_name: str) -> bool:
    """Whether two stored tensors have the same values; reads little of those that differ."""
    one, other = a.tensors[a_name], b.tensors[b_name]
    if one.shape != other.shape:
        return False
    if one.dtype_name != other.dtype_name:
        return np.array_equal(a.read(a_name).astype(np.float32), b.read(b_name).astype(np.float32))
    for start in range(0, one.end - one.start, _PIECE):
        if a.read_bytes(a_name, start, _PIECE) != b.read_bytes(b_name, start, _PIECE):
            return False
    return True


def tie_tables(arrays: Mapping[str, Any]) -> Mapping[str, Any]:
    """The weights of a model with one table for both: that of embeddings, whichever is there."""
    head, table = (_first(names, arrays) for names in (HEADS, TABLES))
    if head is None:
        return arrays
    rest = {name: x for name, x in arrays.items() if name != head}
    if table is None:
        return {TABLES[0]: arrays[head], **rest}
    one, other = arrays[head], arrays[table]
    if one is not other and not _equal(one, other):
        raise WeightSyncError(
            f"{head!r} and {table!r} differ, but the engine's model has one table for both: start "
            "an engine from a folder that holds both, or give tie_word_embeddings=False"
        )
    return rest


def untie_tables(arrays: Mapping[str, Any]) -> Mapping[str, Any]:
    """The weights of a model with two tables, from a source that has one for both."""
    head, table = (_first(names, arrays) for names in (HEADS, TABLES))
    if head is None and table is not None:
        return {**arrays, HEADS[0]: arrays[table]}
    if table is None and head is not None:
        return {**arrays, TABLES[0]: arrays[head]}
    return arrays


def first_dtype(folder: str | Path) -> str | None:
    """The dtype of a folder's first floating-point weight, by names; None without weights.

    That of a file that cannot be read is None too: whoever reads its weights says why.
    """
    with contextlib.suppress(WeightLoadError):
        files = find_weight_files(folder)
        with SafetensorsFile(files.folder / files.names[0]) as file:
            for _, tensor in sorted(file.tensors.items()):
                if tensor.dtype_name in _FLOATS:
                    return _FLOATS[tensor.dtype_name]
    return None


def _equal(one: Any, other: Any) -> bool:
    return np.shape(one) == np.shape(other) and bool((one == other).all())
