"""What of a tensor changed, in pieces of a fixed number of elements, losslessly in bits.

Elements are compared as unsigned integers of their size, so that NaN and -0.0 are bits as all
others are. A piece stores the changed elements' values and the gaps before them, or all of its
values where that is no larger.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

PIECE_LEN = 2**20
"""Elements of a piece: temporaries stay small, and in the caches."""

_WIDTHS = {width: np.dtype(f"<u{width}") for width in (1, 2, 4)}


class Piece(NamedTuple):
    """A piece of a tensor.

    Attributes:
        num_values: Elements that are stored.
        width: Bytes of a code of a gap; 0 for a piece that is stored whole, without codes.
        num_codes: Codes of the gaps.
    """

    num_values: int
    width: int
    num_codes: int


class TensorDelta(NamedTuple):
    """A tensor's change.

    Attributes:
        pieces: One for each `PIECE_LEN` elements.
        values: Stored elements, as unsigned integers.
        codes: Codes of the gaps.
        num_changed: Elements that differ.
    """

    pieces: tuple[Piece, ...]
    values: list[np.ndarray]
    codes: list[np.ndarray]
    num_changed: int

    @property
    def is_whole(self) -> bool:
        """Whether every piece is stored whole."""
        return all(piece.width == 0 for piece in self.pieces)


def bits(array: np.ndarray) -> np.ndarray:
    """A contiguous array's elements as unsigned integers [N]; shares memory."""
    return array.reshape(-1).view(f"u{array.dtype.itemsize}")


def update(held: np.ndarray, new: np.ndarray) -> TensorDelta:
    """Copies a tensor over the one that was held, and tells what changed.

    What is told is of the bits that were copied, whatever happens to `new` meanwhile.

    Args:
        held: Bits of the tensor before [N]; `values` of the result may share its memory.
        new: Bits of the new one [N].
    """
    pieces, values, codes = [], [], []
    num_changed = 0
    for start in range(0, held.size, PIECE_LEN):
        target = held[start : start + PIECE_LEN]
        source = new[start : start + PIECE_LEN].copy()
        is_changed = source != target
        count = int(np.count_nonzero(is_changed))
        num_changed += count
        if count == 0:
            pieces.append(Piece(0, 1, 0))
            continue
        target[:] = source
        if count * (source.itemsize + 1) < source.nbytes:  # a code has at least a byte
            indices = np.flatnonzero(is_changed)
            code = encode_gaps(indices)
            if count * source.itemsize + code.nbytes < source.nbytes:
                pieces.append(Piece(count, code.itemsize, len(code)))
                values.append(source[indices])
                codes.append(code)
                continue
        pieces.append(Piece(source.size, 0, 0))
        values.append(target)
    return TensorDelta(tuple(pieces), values, codes, num_changed)


def replace(held: np.ndarray, new: np.ndarray) -> TensorDelta:
    """Copies a tensor over another of its size, whose bits [N] do not matter; stores all of it."""
    held[:] = new
    sizes = [held[start : start + PIECE_LEN].size for start in range(0, held.size, PIECE_LEN)]
    return TensorDelta(tuple(Piece(size, 0, 0) for size in sizes), [held], [], held.size)


def sha256(held: np.ndarray) -> str:
    """Checksum of a tensor's bits [N]."""
    return hashlib.sha256(held.data).hexdigest()


def apply(target: np.ndarray, pieces: Sequence[Piece], values: np.ndarray, codes: bytes) -> None:
    """Writes the stored elements into a tensor's bits [N].

    Raises:
        ValueError: the pieces do not fit the tensor, the values or the codes; the tensor may be
            half written.
    """
    if len(pieces) != -(-target.size // PIECE_LEN):
        raise ValueError(f"{len(pieces)} pieces for {target.size} elements")
    num_values = num_bytes = 0
    for number, piece in enumerate(pieces):
        part = target[number * PIECE_LEN : (number + 1) * PIECE_LEN]
        some = values[num_values : num_values + piece.num_values]
        num_values += piece.num_values
        if piece.width == 0:
            part[:] = some  # raises unless they are as many
            continue
        code = np.frombuffer(codes, _WIDTHS[piece.width], piece.num_codes, num_bytes)
        num_bytes += code.nbytes
        indices = decode_gaps(code)
        if len(indices) != len(some) or (len(indices) and indices[-1] >= len(part)):
            raise ValueError(f"piece {number} has {len(indices)} indices, {len(some)} values")
        part[indices] = some
    if num_values != len(values) or num_bytes != len(codes):
        raise ValueError(f"{len(values)} values and {len(codes)} bytes of codes, not all used")


def num_code_bytes(pieces: Sequence[Piece]) -> int:
    """Bytes of the codes of some pieces."""
    return sum(piece.width * piece.num_codes for piece in pieces)


def encode_gaps(indices: np.ndarray) -> np.ndarray:
    """Codes of the gaps before rising indices [N], in the smallest of three integer types.

    A code is a number of elements to pass before the next one that is stored; the largest number of
    the type passes as many and stores none.
    """
    gaps = (np.diff(indices, prepend=-1) - 1).astype(np.uint32)
    escapes = {width: gaps // np.iinfo(dtype).max for width, dtype in _WIDTHS.items()}
    width = min(_WIDTHS, key=lambda each: each * (len(gaps) + int(escapes[each].sum())))
    limit = np.uint32(np.iinfo(_WIDTHS[width]).max)
    ends = np.arange(len(gaps)) + np.cumsum(escapes[width], dtype=np.int64)
    codes = np.full(ends[-1] + 1 if len(ends) else 0, limit, _WIDTHS[width])
    codes[ends] = gaps - escapes[width] * limit
    return codes


def decode_gaps(codes: np.ndarray) -> np.ndarray:
    """The indices [N] that `encode_gaps` got."""
    is_stored = codes != np.iinfo(codes.dtype).max
    passed = np.cumsum(codes, dtype=np.int64)[is_stored]
    return passed + np.arange(len(passed))
