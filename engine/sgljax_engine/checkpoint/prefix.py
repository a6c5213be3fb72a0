"""The content of a prefix cache in a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from sgljax_engine.checkpoint.codecs import INT, SIZE, TEXT, Codec, Plain, from_dict, to_dict
from sgljax_engine.checkpoint.fields import MAX_TOKEN, Fields, int_array
from sgljax_engine.errors import CheckpointError

BITS = {
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.uint16),
    "float32": np.dtype(np.uint32),
}
"""The dtype that keeps the bits of a KV cache, by its dtype's name: numpy has no bfloat16."""

_MAX_LAYERS = 1 << 16

Nodes = Sequence[tuple[int, tuple[int, ...]]]


class LayerPages(NamedTuple):
    """The bits of one layer's cached pages, in the order of the nodes.

    Shape:
        k, v: [num_nodes, num_kv_heads, page_size, head_dim] of `BITS[dtype]`, of the layer's shape
    """

    k: np.ndarray
    v: np.ndarray


class _NodesCodec(Codec):
    """`num_nodes`, `parents` [N] and `tokens` [N, page_size]."""

    def entries(self, name: str) -> dict[str, tuple[str, ...]]:
        return {"num_nodes": (), "parents": INT, "tokens": INT}

    def write(self, name: str, value: Nodes, where: str) -> dict[str, Any]:
        parents = [parent for parent, _ in value]
        tokens = [list(tokens) for _, tokens in value]
        return {
            "num_nodes": len(value),
            "parents": int_array(parents, f"{where}: parents", low=-1),
            "tokens": int_array(tokens, f"{where}: tokens", num_dims=2),
        }

    def read(self, name: str, fields: Fields, known: Mapping[str, Any]) -> Nodes:
        parents = fields.ints("parents", low=-1).tolist()
        tokens = fields.ints("tokens", num_dims=2).tolist()
        if len(parents) != fields.count("num_nodes") or len(tokens) != len(parents):
            raise fields.error("num_nodes", f"that of parents and tokens, {len(parents)}")
        return [(parent, tuple(each)) for parent, each in zip(parents, tokens, strict=True)]


def read_kv_shapes(fields: Fields, name: str) -> list[tuple[int, int]]:
    """Reads [num_kv_heads, head_dim] of each layer."""
    shapes = fields.list(name)
    if not 1 <= len(shapes) <= _MAX_LAYERS or not all(map(_is_shape, shapes)):
        raise fields.error(
            name, f"1 to {_MAX_LAYERS} pairs of num_kv_heads and head_dim in [1, {MAX_TOKEN}]"
        )
    return [(heads, head_dim) for heads, head_dim in shapes]


def _is_shape(value: object) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and all(type(size) is int and 1 <= size <= MAX_TOKEN for size in value)
    )


def _read_pages(fields: Fields, name: str) -> list[LayerPages]:
    pages = fields.list(name)
    if not all(isinstance(layer, LayerPages) for layer in pages):
        raise fields.error(name, "a list of LayerPages")
    return pages


_NODES = _NodesCodec()
_KV_SHAPES = Plain(read_kv_shapes, lambda shapes, where: [list(shape) for shape in shapes])
_PAGES = Plain(_read_pages, lambda pages, where: list(pages))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixCheckpoint:
    """Cached prefixes with their keys and values.

    Pages may be gigabytes, so they are one pair of arrays a layer and nobody copies them: saving
    reads them in place if they are C-contiguous, loading maps the file into memory (read-only)
    unless it is compressed.

    Attributes:
        page_size: Of the cache.
        dtype: Of the cache, a key of `BITS`.
        kv_shapes: (num_kv_heads, head_dim) of each layer in the cache.
        nodes: (parent, tokens) of each page: the index of the page before it, or -1 for none, and
            a whole page of tokens. Parents come before their children.
        pages: One entry a layer.
    """

    page_size: Annotated[int, SIZE]
    dtype: Annotated[str, TEXT]
    kv_shapes: Annotated[Sequence[tuple[int, int]], _KV_SHAPES]
    nodes: Annotated[Nodes, _NODES]
    pages: Annotated[Sequence[LayerPages], _PAGES]

    def __post_init__(self) -> None:
        """Raises CheckpointError naming the node or layer that does not fit."""
        if self.dtype not in BITS:
            raise CheckpointError(f"prefix dtype must be one of {list(BITS)}, got {self.dtype!r}")
        seen: set[tuple[int, tuple[int, ...]]] = set()
        for index, (parent, tokens) in enumerate(self.nodes):
            if not -1 <= parent < index:
                raise CheckpointError(
                    f"prefix node {index}: its parent must be in [-1, {index - 1}], got {parent}"
                )
            if len(tokens) != self.page_size:
                raise CheckpointError(
                    f"prefix node {index} must have {self.page_size} tokens, got {len(tokens)}"
                )
            if (parent, tokens) in seen:
                raise CheckpointError(f"prefix node {index} is there twice")
            seen.add((parent, tokens))
        if len(self.pages) != len(self.kv_shapes):
            raise CheckpointError(
                f"prefix pages must have {len(self.kv_shapes)} layers, got {len(self.pages)}"
            )
        bits = BITS[self.dtype]
        for layer, pair in enumerate(self.pages):
            heads, head_dim = self.kv_shapes[layer]
            shape = (len(self.nodes), heads, self.page_size, head_dim)
            for array in pair:
                if array.shape != shape or array.dtype != bits:
                    raise CheckpointError(
                        f"prefix pages of layer {layer} must be {bits} {list(shape)}, "
                        f"got {array.dtype} {list(array.shape)}"
                    )

    def of_sequences(self, sequences: Sequence[Sequence[int]]) -> PrefixCheckpoint | None:
        """The pages that these token sequences begin with; None if there are none."""
        children = {node: index for index, node in enumerate(self.nodes)}
        kept: set[int] = set()
        for tokens in sequences:
            place, start = -1, 0
            while start + self.page_size <= len(tokens):
                page = tuple(tokens[start : start + self.page_size])
                found = children.get((place, page))
                if found is None:
                    break
                kept.add(found)
                place, start = found, start + self.page_size
        return self._taken(sorted(kept))

    def _taken(self, kept: Sequence[int]) -> PrefixCheckpoint | None:
        """Some of the nodes, parents before their children."""
        if not kept:
            return None
        places = {-1: -1} | {index: place for place, index in enumerate(kept)}
        return dataclasses.replace(
            self,
            nodes=[(places[self.nodes[index][0]], self.nodes[index][1]) for index in kept],
            pages=[LayerPages(k[list(kept)], v[list(kept)]) for k, v in self.pages],
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON but for the arrays: `parents` [N], `tokens` [N, page_size], `pages` as they are."""
        return to_dict(self, "prefix_cache")

    @classmethod
    def from_dict(cls, given: object) -> PrefixCheckpoint:
        """The inverse of `to_dict`. Raises CheckpointError."""
        return from_dict(cls, given, "prefix_cache")


def merge_prefixes(parts: Sequence[PrefixCheckpoint]) -> PrefixCheckpoint | None:
    """The prefixes of several caches of one geometry, each once; None of none.

    Copies all pages if there are several caches.
    """
    if len(parts) < 2:
        return parts[0] if parts else None
    found: dict[tuple[int, tuple[int, ...]], int] = {}
    rows: list[list[int]] = []
    for part in parts:
        places, own = {-1: -1}, []
        for index, (parent, tokens) in enumerate(part.nodes):
            node = (places[parent], tokens)
            if node not in found:
                found[node] = len(found)
                own.append(index)
            places[index] = found[node]
        rows.append(own)
    layers = [
        LayerPages(*(np.concatenate(each) for each in zip(*taken, strict=True)))
        for taken in zip(
            *(
                [(k[own], v[own]) for k, v in part.pages]
                for part, own in zip(parts, rows, strict=True)
            ),
            strict=True,
        )
    ]
    return dataclasses.replace(parts[0], nodes=list(found), pages=layers)
