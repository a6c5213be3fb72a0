"""Packs sequences for scoring, so that a shared prefix is computed once.

Sequences are cut into blocks from their start. A block with the same tokens and the same earlier
blocks has the same hidden states in every sequence, so it is packed once: the samples of a group
share the whole blocks of their prompt. The blocks of a batch are also pages: each attends to the
blocks on its path.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from sgljax_engine.runner.batches.batch import pick_bucket


class ScoreBatch(NamedTuple):
    """Blocks of `T // N` tokens of sequences, and the tokens to score.

    Shape: input_ids, positions: [T] int32; padding is 0. page_table: [N, P] int32, the blocks up to
        each block, itself included. seq_lens: [N] int32, tokens that each block may see, its own
        included; 0 for unused blocks. places: [T] int32, index among the T tokens of the one before
        each scored token. targets: [T] int32, each scored token. num_scored: int32.
    """

    input_ids: jax.Array
    positions: jax.Array
    page_table: jax.Array
    seq_lens: jax.Array
    places: jax.Array
    targets: jax.Array
    num_scored: jax.Array


class PackedScores(NamedTuple):
    """A batch for a few sequences, and for each the index of the result for each scored token."""

    batch: ScoreBatch
    slots: list[np.ndarray]


class _Block(NamedTuple):
    parent: int
    """Negative for the first of a sequence: -1, or another number for each sequence."""

    depth: int
    tokens: tuple[int, ...]


def pack_scores(
    sequences: Sequence[Sequence[int]],
    starts: Sequence[int],
    *,
    buckets: Sequence[int],
    max_tokens: int,
    block: int,
    table_width: int,
    shares: bool = True,
) -> Iterator[PackedScores]:
    """Packs sequences, in order, into as few batches as possible.

    The first scored token of a sequence is at least 1. Buckets are ascending multiples of `block`
    tokens, one of which is `max_tokens`, the maximum of a batch with several sequences. Unless
    `shares`, the blocks of a sequence are neighbours, and equal ones are packed again.
    """
    packer = _Packer(block, shares)
    paths: list[list[int]] = []
    first = 0
    for index, sequence in enumerate(sequences):
        if paths and (len(packer.blocks) + packer.num_new(sequence)) * block > max_tokens:
            part = slice(first, index)
            yield packer.build(sequences[part], starts[part], paths, buckets, table_width)
            packer, paths, first = _Packer(block, shares), [], index
        paths.append(packer.add(sequence))
    if paths:
        yield packer.build(sequences[first:], starts[first:], paths, buckets, table_width)


class _Packer:
    """Blocks of one batch, parents before children."""

    def __init__(self, block: int, shares: bool) -> None:
        self._block = block
        self._shares = shares
        self.blocks: dict[_Block, int] = {}

    def _cut(self, sequence: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        starts = range(0, len(sequence), self._block)
        return ((i, tuple(sequence[at : at + self._block])) for i, at in enumerate(starts))

    @property
    def _root(self) -> int:
        """The parent of a sequence's first block, which no other has if nothing is shared."""
        return -1 if self._shares else -1 - len(self.blocks)

    def num_new(self, sequence: Sequence[int]) -> int:
        parent = self._root
        for depth, tokens in self._cut(sequence):
            found = self.blocks.get(_Block(parent, depth, tokens))
            if found is None:
                return -(-len(sequence) // self._block) - depth
            parent = found
        return 0

    def add(self, sequence: Sequence[int]) -> list[int]:
        path, parent = [], self._root
        for depth, tokens in self._cut(sequence):
            parent = self.blocks.setdefault(_Block(parent, depth, tokens), len(self.blocks))
            path.append(parent)
        return path

    def build(
        self,
        sequences: Sequence[Sequence[int]],
        starts: Sequence[int],
        paths: Sequence[Sequence[int]],
        buckets: Sequence[int],
        table_width: int,
    ) -> PackedScores:
        """The arrays of all blocks; `paths` are the results of `add` for the sequences."""
        block = self._block
        size = pick_bucket(buckets, len(self.blocks) * block)
        input_ids = np.zeros((size // block, block), np.int32)
        depths = np.zeros(size // block, np.int32)
        page_table = np.zeros((size // block, table_width), np.int32)
        seq_lens = np.zeros(size // block, np.int32)
        for index, (parent, depth, tokens) in enumerate(self.blocks):
            input_ids[index, : len(tokens)] = tokens
            depths[index] = depth
            page_table[index, :depth] = page_table[parent, :depth]
            page_table[index, depth] = index
            seq_lens[index] = depth * block + len(tokens)
        positions = depths[:, None] * block + np.arange(block, dtype=np.int32)
        pairs = [self._pairs(*each) for each in zip(sequences, starts, paths, strict=True)]
        # Equal pairs of place and target share one score, so there are at most T of them.
        scored, slots = np.unique(np.concatenate(pairs), axis=0, return_inverse=True)
        places, targets = np.zeros(size, np.int32), np.zeros(size, np.int32)
        places[: len(scored)], targets[: len(scored)] = scored.T
        ends = list(itertools.accumulate(len(each) for each in pairs))
        batch = ScoreBatch(
            input_ids.reshape(-1),  # type: ignore[arg-type]
            positions.reshape(-1),  # type: ignore[arg-type]
            page_table,  # type: ignore[arg-type]
            seq_lens,  # type: ignore[arg-type]
            places,  # type: ignore[arg-type]
            targets,  # type: ignore[arg-type]
            np.int32(len(scored)),  # type: ignore[arg-type]
        )
        return PackedScores(batch, np.split(slots.reshape(-1), ends[:-1]))

    def _pairs(self, sequence: Sequence[int], start: int, path: Sequence[int]) -> np.ndarray:
        """Place and target [M, 2] of each scored token of a sequence."""
        before = np.arange(start - 1, len(sequence) - 1)
        blocks = np.asarray(path, np.int64)
        places = blocks[before // self._block] * self._block + before % self._block
        return np.stack([places, np.asarray(sequence[start:], np.int64)], axis=1)
