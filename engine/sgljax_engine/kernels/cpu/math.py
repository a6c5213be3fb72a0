"""Functions of vectors of float32."""

from __future__ import annotations

from collections.abc import Sequence

from sgljax_engine.kernels.cpu.emit import I32, Code, Value, f32, i32, lanes_of, vector

_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
"""ln 2 in two parts; small multiples of the first are exact."""

_EXP_TERMS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    0.5,
)
"""Coefficients of e^r from r^7 down to r^2, for |r| <= ln(2) / 2: Cephes' expf (Moshier, 1992)."""

_SMALLEST = -87.0
"""e to a smaller power counts as 0."""


def exp(code: Code, x: Value) -> Value:
    """e^x of a vector, to about two units in the last place; 0 below -87. x is at most 88."""
    lanes = lanes_of(x.type)

    def constant(value: float) -> Value:
        return code.splat(f32(value), lanes)

    x_low = code.float_max(x, constant(_SMALLEST))
    whole = code.round_even(code.float_op("fmul", x_low, constant(_LOG2_E)))
    rest = code.fma(whole, constant(-_LN2_HIGH), x_low)
    rest = code.fma(whole, constant(-_LN2_LOW), rest)
    terms = constant(_EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        terms = code.fma(terms, rest, constant(term))
    square = code.float_op("fmul", rest, rest)
    value = code.float_op("fadd", code.fma(terms, square, rest), constant(1.0))
    bits = vector(lanes, I32)
    exponent = code.add(code.convert("fptosi", whole, bits), code.splat(i32(127), lanes))
    power = code.convert("bitcast", code.shift_left(exponent, code.splat(i32(23), lanes)), x.type)
    result = code.float_op("fmul", value, power)
    is_nothing = code.float_compare("olt", x, constant(_SMALLEST))
    return code.select(is_nothing, code.zeros(lanes), result)


def tanh(code: Code, x: Value) -> Value:
    """Tanh of a vector, to about 1e-7: 1 - 2 / (e^2x + 1)."""
    lanes = lanes_of(x.type)
    limit = code.splat(f32(20.0), lanes)  # where tanh is 1 in float32
    x = code.negative(code.float_max(code.negative(x), code.negative(limit)))
    grown = exp(code, code.float_op("fadd", x, x))
    one, two = code.splat(f32(1.0), lanes), code.splat(f32(2.0), lanes)
    return code.float_op("fsub", one, code.float_op("fdiv", two, code.float_op("fadd", grown, one)))


def add_neighbours(code: Code, a: Value, b: Value, distance: int, lanes: int) -> Value:
    """Adds lanes `distance` apart: those of `a`, and of `b` in lanes where that bit is set."""
    is_set = [bool(lane & distance) for lane in range(lanes)]
    left = [lanes + (lane ^ distance) if is_set[lane] else lane for lane in range(lanes)]
    right = [lanes + lane if is_set[lane] else lane ^ distance for lane in range(lanes)]
    return code.float_op("fadd", code.shuffle(a, b, left), code.shuffle(a, b, right))


def sum_each(code: Code, vectors: Sequence[Value], target: Value, lanes: int) -> None:
    """Stores the sum of the lanes of each vector, one after another.

    Sums a power of two of vectors at a time, with three instructions for each and a few more.
    """
    done = 0
    while done < len(vectors):
        count = min(1 << (len(vectors) - done).bit_length() - 1, lanes)
        found = list(vectors[done : done + count])
        distance = 1
        while len(found) > 1:  # neighbours first: lane i then belongs to vector i
            pairs = zip(found[::2], found[1::2], strict=True)
            found = [add_neighbours(code, a, b, distance, lanes) for a, b in pairs]
            distance *= 2
        (total,) = found
        while distance < lanes:
            total = add_neighbours(code, total, total, distance, lanes)
            distance *= 2
        for lane in range(count):
            code.store(code.lane(total, lane), code.at(target, done + lane))
        done += count
