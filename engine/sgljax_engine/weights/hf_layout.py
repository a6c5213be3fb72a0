"""Finds the safetensors files of the model in a Hugging Face folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from sgljax_engine.errors import WeightLoadError
from sgljax_engine.weights.hf_json import read_weight_map

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightFiles:
    """The files of a model.

    Attributes:
        folder: The folder.
        names: File names in it, sorted; they need not exist.
        index: The file of each tensor by the index; None for a single file without an index.
    """

    folder: Path
    names: tuple[str, ...]
    index: Mapping[str, str] | None

    def num_bytes(self) -> int:
        """Total bytes of the files that exist."""
        paths = [self.folder / name for name in self.names]
        return sum(path.stat().st_size for path in paths if path.is_file())


def find_weight_files(folder: str | Path) -> WeightFiles:
    """The files that transformers would load.

    transformers reads `model.safetensors`, or without it the shards that the index lists. Saving
    one form over the other leaves files of the old model: an index without shards, which is
    ignored, or two whole sets, of which nothing tells the newer one.

    Raises:
        WeightLoadError: for two whole sets of files, or an index that cannot be read.
    """
    folder = Path(folder)
    has_single = (folder / SINGLE_FILE).exists()
    if not (folder / INDEX_FILE).exists():
        return WeightFiles(folder=folder, names=(SINGLE_FILE,), index=None)
    try:
        index = read_weight_map(folder / INDEX_FILE)
    except WeightLoadError:
        if not has_single:
            raise
        return WeightFiles(folder=folder, names=(SINGLE_FILE,), index=None)
    shards = tuple(sorted(set(index.values())))
    if not has_single or SINGLE_FILE in shards:
        return WeightFiles(folder=folder, names=shards, index=index)
    if shards and all((folder / name).is_file() for name in shards):
        raise WeightLoadError(
            f"{folder} holds two models, {SINGLE_FILE} and the {len(shards)} files that "
            f"{INDEX_FILE} lists ({shards[0]}, ...), and nothing tells which is the newer one: "
            "delete the index with its files, or the single file, which transformers would load"
        )
    return WeightFiles(folder=folder, names=(SINGLE_FILE,), index=None)
