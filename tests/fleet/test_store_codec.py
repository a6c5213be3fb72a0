"""What changed of a tensor, coded and applied again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgljax_engine.fleet import deltas
from tests.fleet.weight_stores import DTYPES, PIECE_LEN, changed, random_array


@given(st.sets(st.integers(0, 2**18), max_size=60))
def test_gaps_are_what_they_were(indices):
    rising = np.array(sorted(indices), np.int64)
    codes = deltas.encode_gaps(rising)
    assert deltas.decode_gaps(codes).tolist() == rising.tolist()


@pytest.mark.parametrize(
    ("step", "num_bytes"),
    [(1, 1), (255, 1), (256, 2), (510, 2), (65_536, 4)],
)
def test_gaps_take_the_smallest_codes(step, num_bytes):
    """A gap of `step - 1`: a code of 255 or more passes and stores nothing."""
    codes = deltas.encode_gaps(np.arange(1, 101) * step - 1)
    assert codes.nbytes == 100 * num_bytes


def test_a_gap_can_be_passed_in_short_codes():
    indices = np.r_[0:50, 400:450]
    codes = deltas.encode_gaps(indices)
    assert codes.dtype == np.uint8
    assert len(codes) == 101
    assert deltas.decode_gaps(codes).tolist() == indices.tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.5, 1.0])
def test_a_change_is_applied_in_bits(dtype, fraction, monkeypatch):
    monkeypatch.setattr(deltas, "PIECE_LEN", PIECE_LEN)
    rng = np.random.default_rng(0)
    for size in (0, 1, PIECE_LEN - 1, PIECE_LEN, 5 * PIECE_LEN + 3):
        before = random_array(rng, dtype, (size,))
        after = changed(rng, {"x": before}, fraction)["x"]
        num_differ = int((deltas.bits(before) != deltas.bits(after)).sum())

        held = before.copy()
        delta = deltas.update(deltas.bits(held), deltas.bits(after))
        assert held.tobytes() == after.tobytes()
        assert delta.num_changed == num_differ
        values = np.concatenate([*delta.values, np.empty(0, f"u{dtype.itemsize}")])
        codes = b"".join(code.tobytes() for code in delta.codes)
        assert values.nbytes + len(codes) <= before.nbytes  # never more than the tensor
        found = before.copy()
        deltas.apply(deltas.bits(found), delta.pieces, values, codes)
        assert found.tobytes() == after.tobytes()


def test_pieces_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr(deltas, "PIECE_LEN", 8)
    target = np.zeros(12, np.uint16)
    value, one = np.ones(1, np.uint16), bytes([3])
    sparse = [deltas.Piece(0, 1, 0), deltas.Piece(1, 1, 1)]
    deltas.apply(target.copy(), sparse, value, one)
    for pieces, values, codes in [
        (sparse[:1], value[:0], b""),  # of a shorter tensor
        (sparse, value, bytes([4])),  # behind the end
        (sparse, value, bytes([255])),  # stores nothing
        (sparse, value, one + one),  # not all used
        (sparse, np.ones(2, np.uint16), one),
        (sparse, value, b""),  # codes are missing
        ([deltas.Piece(3, 0, 0), sparse[0]], np.ones(3, np.uint16), b""),  # a whole one, shorter
    ]:
        with pytest.raises(ValueError, match=r"\w"):
            deltas.apply(target.copy(), pieces, values, codes)
