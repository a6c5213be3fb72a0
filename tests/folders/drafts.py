"""Drafts of model folders: what edits change, and how a draft becomes files.

A draft's weights follow from their names alone, and each value is one that bfloat16 has, so that
the stored dtype changes no answer. Runs without JAX and without torch.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tests.folders.families import FAMILIES, VOCAB, Config, Family, Shapes

NUM_TOKENS = 64
TOKENS = np.random.default_rng(57).integers(4, VOCAB, NUM_TOKENS, dtype=np.int32)
"""The sequence that answers are log-probs of."""

_DTYPES = {"F32": "<u4", "BF16": "<u2", "F16": "<f2"}


@dataclasses.dataclass
class Draft:
    """A folder before it is written.

    Attributes:
        name: Name of its family and of its edits.
        family: The family.
        config: The contents of config.json.
        shapes: Shapes of the weights, by the names they get their values from.
        renames: Names that files have instead.
        dtypes: Stored dtypes that differ from `dtype`, by name.
        dtype: Stored dtype of the weights: F32, BF16 or F16.
        num_shards: Number of files.
        index: Changes of the index's map of names to files; None removes a name.
        files: Other JSON files, such as generation_config.json.
        twice: Names that the last shard holds too.
        copies: Further names, and the weight that each holds once more.
    """

    name: str
    family: Family
    config: Config
    shapes: Shapes
    renames: dict[str, str] = dataclasses.field(default_factory=dict)
    dtypes: dict[str, str] = dataclasses.field(default_factory=dict)
    dtype: str = "F32"
    num_shards: int = 1
    index: dict[str, str | None] = dataclasses.field(default_factory=dict)
    files: dict[str, Config] = dataclasses.field(default_factory=dict)
    twice: tuple[str, ...] = ()
    copies: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, family: str) -> Draft:
        """The folder of a family that nothing changes: tied ones store no head."""
        found = FAMILIES[family]
        draft = cls(family, found, found.config(), {})
        draft.build()
        if found.text["tie_word_embeddings"]:
            del draft.shapes[found.head]
        return draft

    @property
    def text(self) -> Config:
        """Settings of the language model."""
        return self.config.get("text_config", self.config)

    def build(self) -> None:
        """Makes weights for the sizes that the config has now."""
        self.shapes = self.family.shapes(self.text)

    @property
    def embedding(self) -> str:
        """Name of the table of embeddings."""
        return f"{self.family.prefix}embed_tokens.weight"

    def set(self, **settings: Any) -> None:
        """Changes settings of the language model."""
        self.text.update(settings)

    def drop(self, *names: str) -> None:
        """Removes settings, inside and outside."""
        for name in names:
            self.text.pop(name, None)
            self.config.pop(name, None)

    def arrays(self) -> dict[str, np.ndarray]:
        """Weights as float32, by the names in the files."""
        found = {self.renames.get(n, n): values(n, shape) for n, shape in self.shapes.items()}
        return found | {name: found[source] for name, source in self.copies.items()}

    def write(self, folder: Path) -> None:
        """Writes the folder's files."""
        (folder / "config.json").write_text(json.dumps(self.config), encoding="ascii")
        for name, content in self.files.items():
            (folder / name).write_text(json.dumps(content), encoding="ascii")
        arrays = self.arrays()
        if self.num_shards == 1 and not self.index:
            self._write_shard(folder / "model.safetensors", arrays)
            return
        names, count = sorted(arrays), self.num_shards
        files = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        weight_map: dict[str, str] = {}
        for i, file in enumerate(files):
            shard = names[i::count] + (list(self.twice) if i == count - 1 else [])
            self._write_shard(folder / file, {name: arrays[name] for name in shard})
            weight_map |= dict.fromkeys(names[i::count], file)
        for name, file in self.index.items():
            weight_map[name] = file or ""
        weight_map = {name: file for name, file in weight_map.items() if file}
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="ascii")

    def _write_shard(self, path: Path, arrays: dict[str, np.ndarray]) -> None:
        dtypes = {self.renames.get(name, name): dtype for name, dtype in self.dtypes.items()}
        write_safetensors(path, arrays, {n: dtypes.get(n, self.dtype) for n in arrays})


def write_safetensors(
    path: Path, arrays: dict[str, np.ndarray], dtypes: dict[str, str] | None = None
) -> None:
    """Writes float32 arrays, rounded to the dtypes named for them; NumPy has no bfloat16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chunks, at = [], 0
    for name, array in arrays.items():
        dtype = (dtypes or {}).get(name, "F32")
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        if dtype == "BF16":
            data = (bits >> 16).astype("<u2").tobytes()
        elif dtype == "F16":
            data = array.astype(np.float16).tobytes()
        else:
            data = bits.astype(_DTYPES[dtype]).tobytes()
        offsets = [at, at + len(data)]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
        chunks.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The weight of a name, float32 that bfloat16 has; large enough that no setting is unseen."""
    rng = np.random.default_rng([zlib.crc32(name.encode()), *shape])
    noise = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("A_log"):
        found = np.log(rng.uniform(1.0, 8.0, shape))
    elif name.endswith("layer_scalar"):
        found = 0.8 + 0.1 * noise
    elif "norm" in name:
        found = 0.3 * noise + (1.0 if name.endswith("linear_attn.norm.weight") else 0.6)
    elif name.endswith("bias"):
        found = 0.5 * noise
    elif "embed_tokens" in name or "lm_head" in name:
        found = 0.4 * noise
    else:
        found = 1.3 * noise / np.sqrt(shape[-1])
    bits = np.asarray(found, np.float32).view(np.uint32)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)
