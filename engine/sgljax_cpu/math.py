"""Functions of vectors of float32, and some of float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sgljax_cpu.emit import I32, I64, Code, Value, f32, f64, i32, lanes_of, vector

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


_EXP_DOUBLE_TERMS = tuple(1 / math.factorial(n) for n in range(13, 1, -1))
"""Taylor coefficients of e^r from r^13 down to r^2: enough for a double, for |r| <= ln(2) / 2."""

_LN2, _LN2_REST = 0.6931471805599453, 2.3190468138462996e-17

_SMALLEST_DOUBLE = -700.0


def exp_double(code: Code, x: Value) -> Value:
    """e^x of a vector of doubles, to about 1e-15; 0 below -700. x is at most 1."""
    lanes = lanes_of(x.type)

    def constant(value: float) -> Value:
        return code.splat(f64(value), lanes)

    is_nothing = code.float_compare("olt", x, constant(_SMALLEST_DOUBLE))
    x = code.select(is_nothing, constant(0.0), x)
    whole = code.round_even(code.float_op("fmul", x, constant(_LOG2_E)))
    rest = code.fma(whole, constant(-_LN2), x)
    rest = code.fma(whole, constant(-_LN2_REST), rest)
    terms = constant(_EXP_DOUBLE_TERMS[0])
    for term in _EXP_DOUBLE_TERMS[1:]:
        terms = code.fma(terms, rest, constant(term))
    square = code.float_op("fmul", rest, rest)
    value = code.float_op("fadd", code.fma(terms, square, rest), constant(1.0))
    small, large = vector(lanes, I32), vector(lanes, I64)
    exponent = code.convert("sext", code.convert("fptosi", whole, small), large)
    exponent = code.add(exponent, code.splat(Value(I64, "1023"), lanes))
    shift = code.splat(Value(I64, "52"), lanes)
    power = code.convert("bitcast", code.shift_left(exponent, shift), x.type)
    result = code.float_op("fmul", value, power)
    return code.select(is_nothing, constant(0.0), result)


_LOG_TERMS = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
"""Coefficients of r^8 down to r^0 in (log(1 + r) - r + r^2 / 2) / r^3: Cephes' logf."""

_SQRT_HALF = 0.707106781186547524


def log(code: Code, x: Value) -> Value:
    """Log(x) of a vector of normal numbers > 0, to about two units in the last place."""
    lanes = lanes_of(x.type)
    bits_type = vector(lanes, I32)

    def constant(value: float) -> Value:
        return code.splat(f32(value), lanes)

    def integer(value: int) -> Value:
        return code.splat(i32(value), lanes)

    bits = code.convert("bitcast", x, bits_type)
    exponent = code.sub(code.shift_right(bits, integer(23)), integer(126))
    half = code.either(code.both(bits, integer(0x007FFFFF)), integer(0x3F000000))
    mantissa = code.convert("bitcast", half, x.type)  # in [0.5, 1)
    is_low = code.float_compare("olt", mantissa, constant(_SQRT_HALF))
    whole = code.convert("sitofp", exponent, x.type)
    whole = code.float_op("fsub", whole, code.select(is_low, constant(1.0), code.zeros(lanes)))
    more = code.select(is_low, mantissa, code.zeros(lanes))
    rest = code.float_op("fsub", code.float_op("fadd", mantissa, more), constant(1.0))
    terms = constant(_LOG_TERMS[0])
    for term in _LOG_TERMS[1:]:
        terms = code.fma(terms, rest, constant(term))
    square = code.float_op("fmul", rest, rest)
    value = code.float_op("fmul", code.float_op("fmul", terms, rest), square)
    value = code.fma(whole, constant(_LN2_LOW), value)
    value = code.fma(square, constant(-0.5), value)
    return code.fma(whole, constant(_LN2_HIGH), code.float_op("fadd", rest, value))


def tanh(code: Code, x: Value) -> Value:
    """Tanh of a vector, to about 1e-7: 1 - 2 / (e^2x + 1)."""
    lanes = lanes_of(x.type)
    limit = code.splat(f32(20.0), lanes)  # where tanh is 1 in float32
    x = code.negative(code.float_max(code.negative(x), code.negative(limit)))
    grown = exp(code, code.float_op("fadd", x, x))
    one, two = code.splat(f32(1.0), lanes), code.splat(f32(2.0), lanes)
    return code.float_op("fsub", one, code.float_op("fdiv", two, code.float_op("fadd", grown, one)))


_HALF_PI_HIGH, _HALF_PI_LOW = 1.5707963267948966, 6.123233995736766e-17
"""pi / 2 in two parts."""

_SIN_TERMS = tuple((-1) ** i / math.factorial(2 * i + 1) for i in range(7, 0, -1))
_COS_TERMS = tuple((-1) ** i / math.factorial(2 * i) for i in range(8, 0, -1))
"""Taylor coefficients behind the first term: enough for a double, for |r| <= pi / 4."""


def sin_cos(code: Code, angle: Value) -> tuple[Value, Value]:
    """Sine and cosine of a vector of doubles up to 2^31 in size, to about 1e-10.

    The angle is reduced by multiples of pi / 2, which is held in two parts (Cody and Waite, 1980).
    """
    lanes = lanes_of(angle.type)

    def constant(value: float) -> Value:
        return code.splat(f64(value), lanes)

    def series(start: Value, terms: Sequence[float], square: Value) -> Value:
        total = constant(terms[0])
        for term in terms[1:]:
            total = code.fma(total, square, constant(term))
        return code.fma(code.float_op("fmul", total, square), start, start)

    turns = code.round_even(code.float_op("fmul", angle, constant(1 / _HALF_PI_HIGH)))
    rest = code.fma(turns, constant(-_HALF_PI_HIGH), angle)
    rest = code.fma(turns, constant(-_HALF_PI_LOW), rest)
    square = code.float_op("fmul", rest, rest)
    sine, cosine = (
        series(start, terms, square)
        for start, terms in ((rest, _SIN_TERMS), (constant(1.0), _COS_TERMS))
    )
    integers = vector(lanes, I32)
    quadrant = code.convert("fptosi", turns, integers)

    def has(bit: int, value: Value) -> Value:
        found = code.both(value, code.splat(i32(bit), lanes))
        return code.compare("ne", found, code.splat(i32(0), lanes))

    is_odd = has(1, quadrant)
    sines, cosines = code.select(is_odd, cosine, sine), code.select(is_odd, sine, cosine)
    next_quadrant = code.add(quadrant, code.splat(i32(1), lanes))
    return (
        code.select(has(2, quadrant), code.negative(sines), sines),
        code.select(has(2, next_quadrant), code.negative(cosines), cosines),
    )


def add_neighbours(code: Code, a: Value, b: Value, distance: int, lanes: int) -> Value:
    """Adds lanes `distance` apart: those of `a`, and of `b` in lanes where that bit is set."""
    is_set = [bool(lane & distance) for lane in range(lanes)]
    left = [lanes + (lane ^ distance) if is_set[lane] else lane for lane in range(lanes)]
    right = [lanes + lane if is_set[lane] else lane ^ distance for lane in range(lanes)]
    return code.float_op("fadd", code.shuffle(a, b, left), code.shuffle(a, b, right))
