"""Reads weights from a Hugging Face model folder, and makes random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sgljax_engine.errors import WeightLoadError
from sgljax_engine.weights.hf_layout import WeightFiles
from sgljax_engine.weights.safetensors_file import SafetensorsFile


def read_hf_folder(
    files: WeightFiles,
    on_read: Callable[[int], None] = lambda num_bytes: None,
    ignores: Callable[[str], bool] = lambda name: False,
) -> dict[str, np.ndarray]:
    """The tensors of a model's safetensors files, by name.

    The index only names the files, as for transformers: a tensor that it leaves out is read, and
    one that no file holds is missed by whoever needs it. `on_read` is called with the bytes of each
    tensor once it is read, and with those that are left unread of a file at its end.
    """
    tensors: dict[str, np.ndarray | None] = {}
    places: dict[str, str] = {}
    for file_name in files.names:
        for name, tensor in _read_file(files.folder / file_name, on_read, ignores):
            if name in tensors:
                raise WeightLoadError(
                    f"{files.folder}: {places[name]} and {file_name} both hold {name!r}"
                )
            tensors[name], places[name] = tensor, file_name
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _read_file(
    path: Path, on_read: Callable[[int], None], ignores: Callable[[str], bool]
) -> Iterator[tuple[str, np.ndarray | None]]:
    """Each name of a file with its tensor; None for one that is ignored."""
    with SafetensorsFile(path) as file:
        num_left = file.num_bytes
        for name in file.tensors:
            if ignores(name):
                yield name, None
                continue
            tensor = file.read(name)
            num_left -= tensor.nbytes
            on_read(tensor.nbytes)
            yield name, tensor
    on_read(num_left)


def random_weights(
    shapes: Mapping[str, tuple[int, ...]], fills: Mapping[str, float], seed: int
) -> dict[str, Any]:
    """Random weights in logical shapes. Each tensor depends only on the seed and its own name."""
    weights = {}
    for name, shape in shapes.items():
        if name in fills:
            weights[name] = np.full(shape, fills[name], np.float32)
            continue
        rng = np.random.default_rng([seed, *name.encode()])
        weights[name] = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
    return weights
