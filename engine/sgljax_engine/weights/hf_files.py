"""Reads and writes Hugging Face weights tensor by tensor, in shards."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from sgljax_engine.errors import WeightLoadError
from sgljax_engine.weights.hf_layout import INDEX_FILE, SINGLE_FILE, find_weight_files
from sgljax_engine.weights.lora import merge_on_host
from sgljax_engine.weights.plan import plan_sync
from sgljax_engine.weights.rules import WeightRule, indices_by_axis
from sgljax_engine.weights.safetensors_file import SafetensorsFile
from sgljax_engine.weights.specs import Step, TargetSpec, source_spec

_DTYPES = tuple(np.dtype(each) for each in ("f8", "f4", "f2", jnp.bfloat16))
"""Dtypes of weights."""


class HfTensor(NamedTuple):
    """A lazily loaded tensor.

    Attributes:
        shape: Shape that Hugging Face stores; [out, in] for a projection.
        dtype: Dtype of the result of `load`.
        load: Returns the tensor.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    load: Callable[[], np.ndarray]


def read_hf_tensors(folder: str | Path) -> dict[str, HfTensor]:
    """All tensors of a folder's safetensors files by name, not loaded yet.

    Raises:
        WeightLoadError: names the file that is missing or truncated; for two sets of files.
    """
    files = find_weight_files(folder)
    paths = [files.folder / name for name in files.names]
    return {name: tensor for path in paths for name, tensor in _tensors_of(path)}


def _tensors_of(path: Path) -> Iterator[tuple[str, HfTensor]]:
    with SafetensorsFile(path) as file:
        for name, tensor in file.tensors.items():
            dtype = tensor.dtype
            if dtype is None or dtype not in _DTYPES:
                raise WeightLoadError(f"{path}: {name!r} is {tensor.dtype_name}, no float")
            yield name, HfTensor(tensor.shape, dtype, _loader(path, name, file.stamp))


def _loader(path: Path, name: str, stamp: tuple[int, ...]) -> Callable[[], np.ndarray]:
    def load() -> np.ndarray:
        with SafetensorsFile(path) as file:
            file.check_unchanged(stamp)
            return file.read(name)

    return load


def mapped_tensors(
    weights: Mapping[str, np.ndarray],
    rules: Sequence[WeightRule],
    targets: Mapping[str, TargetSpec],
) -> dict[str, HfTensor]:
    """Maps a trainer's weights to a model's stored form, on the host; each keeps its dtype.

    Raises WeightSyncError that names every parameter that is missing, unused or of the wrong shape.
    """

    def tensor(step: Step) -> HfTensor:
        source, target = weights[step.source], targets[step.target]

        def mapped(x: np.ndarray) -> np.ndarray:
            if step.lora is not None:
                x = merge_on_host(x, weights[step.lora.a], weights[step.lora.b], step.lora)
                x = x.astype(source.dtype)
            if step.part is not None and step.num_parts is not None:
                x = np.split(x, step.num_parts, axis=step.part_axes[0])[step.part[0]]
            elif step.part is not None:
                for axis, index in indices_by_axis(step.part, step.part_axes, x.ndim):
                    x = x.take(index, axis=axis)
            x = x if step.transpose is None else x.transpose(step.transpose)
            return x if step.hook is None else np.asarray(step.hook(jnp.asarray(x)))

        def load() -> np.ndarray:
            if step.stacked:
                y = np.stack([mapped(weights[name]) for name in step.stacked])
            else:
                y = mapped(source)
            return y.reshape(target.shape)

        return HfTensor(target.shape, np.dtype(source.dtype), load)

    steps = plan_sync(source_spec(weights), rules, targets).steps
    return {step.target: tensor(step) for step in steps}


def write_hf_tensors(
    tensors: Mapping[str, HfTensor],
    folder: str | Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int,
    on_tensor: Callable[[str], None] | None = None,
) -> list[Path]:
    """Writes safetensors files, and an index if there are several; returns their paths.

    Holds one shard in memory at a time.

    Args:
        tensors: The tensors to write, in this order.
        folder: An existing folder.
        dtype: Dtype of all tensors; None keeps their own.
        max_shard_bytes: Maximum size of a shard, unless a single tensor is larger.
        on_tensor: Called with each tensor's name when it is loaded.
    """
    folder = Path(folder)
    target = None if dtype is None else jnp.dtype(dtype)
    shards = _split(tensors, target, max_shard_bytes)
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    paths = [folder / name for name in (names if len(shards) > 1 else [SINGLE_FILE])]
    total = 0
    for path, shard in zip(paths, shards, strict=True):
        arrays = {}
        for name in shard:
            array = tensors[name].load()
            arrays[name] = np.ascontiguousarray(array if target is None else array.astype(target))
            total += arrays[name].nbytes
            if on_tensor is not None:
                on_tensor(name)
        save_file(arrays, path, metadata={"format": "pt"})  # required by transformers
    if len(shards) > 1:
        weight_map = {n: path.name for path, s in zip(paths, shards, strict=True) for n in s}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return paths


def _split(
    tensors: Mapping[str, HfTensor], target: np.dtype | None, max_bytes: int
) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        num_bytes = math.prod(tensor.shape) * (target or tensor.dtype).itemsize
        if shards[-1] and size + num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes
    return shards
