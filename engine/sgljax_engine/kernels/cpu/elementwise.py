"""Elementwise arithmetic, on CPUs, in float32: what lies between other operations of a chain.

An expression is compiled to one loop. Each of its steps is rounded, whatever surrounds it: a
product is never fused with a sum. So an element has the same bits in any array.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from sgljax_engine.kernels.cpu.emit import I64, PTR, VOID, Code, Module, Value, f32, i32, vector
from sgljax_engine.kernels.cpu.machine import Vectors
from sgljax_engine.kernels.cpu.math import exp, tanh
from sgljax_engine.kernels.cpu.norm import rows_of_chunk
from sgljax_engine.kernels.cpu.operation import Operation, Plan, Shapes, read_values


class Leaf(NamedTuple):
    """An array of an expression.

    Attributes:
        argument: Index of the argument.
        spread: How it covers the result [R, D]: "full"; "row", one D for all R; "column", one
            number for each R; "one", a single number.
        dtype: "float32" or "bool".
    """

    argument: int
    spread: str
    dtype: str = "float32"


class Apply(NamedTuple):
    """A function of expressions: one of `FUNCTIONS`."""

    function: str
    arguments: tuple[Expression, ...]


Expression = float | Leaf | Apply


def _power(exponent: int) -> Callable[..., Value]:
    def power(code: Code, x: Value) -> Value:
        found = x
        for _ in range(exponent - 1):
            found = code.float_op("fmul", found, x)
        return found

    return power


def _logistic(code: Code, x: Value) -> Value:
    lanes = _lanes(x)
    one = code.splat(f32(1.0), lanes)
    grown = _exp(code, code.negative(x))
    return code.float_op("fdiv", one, code.float_op("fadd", one, grown))


def _exp(code: Code, x: Value) -> Value:
    lanes = _lanes(x)
    limit = code.splat(f32(-88.0), lanes)
    return exp(code, code.negative(code.float_max(code.negative(x), limit)))


def _select(code: Code, condition: Value, no: Value, yes: Value) -> Value:
    return code.select(condition, yes, no)


def _lanes(value: Value) -> int:
    return int(value.type[1:].split()[0])


def _op(how: str) -> Callable[..., Value]:
    def apply(code: Code, a: Value, b: Value) -> Value:
        return code.float_op(how, a, b)

    return apply


FUNCTIONS: Mapping[str, Callable[..., Value]] = {
    "add": _op("fadd"),
    "sub": _op("fsub"),
    "mul": _op("fmul"),
    "div": _op("fdiv"),
    "max": lambda code, a, b: code.float_max(a, b),
    "neg": lambda code, a: code.negative(a),
    "sqrt": lambda code, a: code.square_root(a),
    "tanh": tanh,
    "logistic": _logistic,
    "square": _power(2),
    "cube": _power(3),
    "select_n": _select,
}
"""Functions of vectors, named as JAX's primitives where these have no parameters."""


class Elementwise(NamedTuple):
    """An expression over arrays.

    Attributes:
        expression: What to compute.
        num_leaves: Number of arrays.
        row_size: D, see `Leaf`.
    """

    expression: Expression
    num_leaves: int
    row_size: int


@functools.cache
def elementwise(expression: Expression, num_leaves: int, row_size: int) -> Operation:
    """The operation of an expression whose result is [R, `row_size`]."""
    write = functools.partial(_write, expression=expression, num_leaves=num_leaves)
    return Operation("elementwise", write, functools.partial(_plan, row_size=row_size))


def _plan(arguments: Shapes, results: Shapes, threads: int, *, row_size: int) -> Plan:
    del arguments
    num_rows = math.prod(results[0].shape) // max(row_size, 1)
    each = rows_of_chunk(num_rows, row_size, threads)
    return Plan(-(-num_rows // each), (num_rows, row_size, each))


def _write(module: Module, vectors: Vectors, *, expression: Expression, num_leaves: int) -> Value:
    """Writes f(values, chunk): some rows."""
    lanes = vectors.lanes
    with Code(module, "rows", VOID, [PTR, I64]) as code:
        values, chunk = code.arguments
        *places, num_rows, size, each = read_values(code, values, num_leaves + 1, 3)
        first = code.mul(chunk, each)
        with code.loop(first, code.min(code.add(first, each), num_rows)) as row:
            begin = code.mul(row, size)

            def of_vector(at: Value, there: Value | None) -> None:
                found: dict[Expression, Value] = {}

                def compute(part: Expression) -> Value:
                    if part not in found:
                        found[part] = evaluate(part)
                    return found[part]

                def evaluate(part: Expression) -> Value:
                    if isinstance(part, Apply):
                        inner = [compute(argument) for argument in part.arguments]
                        return FUNCTIONS[part.function](code, *inner)
                    if not isinstance(part, Leaf):
                        return code.splat(f32(part), lanes)
                    base = places[part.argument]
                    if part.spread in ("column", "one"):
                        index = row if part.spread == "column" else Value(I64, "0")
                        return _load_one(code, base, index, part.dtype, lanes)
                    index = code.add(begin, at) if part.spread == "full" else at
                    return _load_vector(code, base, index, part.dtype, there, lanes)

                result = compute(expression)
                target = code.at(places[-1], code.add(begin, at))
                if there is None:
                    code.store(result, target, 4)
                else:
                    code.store_lanes(result, target, there, lanes)

            whole = code.mul(code.div(size, lanes), lanes)
            with code.loop(0, whole, lanes) as at:
                of_vector(at, None)
            left = code.sub(size, whole)
            with code.when(code.less(0, left)):
                of_vector(whole, code.first_lanes(left, lanes))
    return code.function


def _load_one(code: Code, base: Value, index: Value, dtype: str, lanes: int) -> Value:
    if dtype == "bool":
        found = code.load(code.at(base, index, "i8"), "i8")
        return code.splat(code.compare("ne", found, Value("i8", "0")), lanes)
    return code.splat(code.load(code.at(base, index), "float"), lanes)


def _load_vector(
    code: Code, base: Value, index: Value, dtype: str, there: Value | None, lanes: int
) -> Value:
    if dtype == "bool":
        place, bytes_ = code.at(base, index, "i8"), vector(lanes, "i8")
        if there is None:
            found = code.load(place, bytes_, 1)
        else:
            zeros = Value(bytes_, "zeroinitializer")
            arguments = [place, i32(1), there, zeros]
            found = code.intrinsic(f"llvm.masked.load.v{lanes}i8.p0", bytes_, arguments)
        return code.compare("ne", found, Value(bytes_, "zeroinitializer"))
    place = code.at(base, index)
    if there is None:
        return code.load(place, vector(lanes), 4)
    return code.load_lanes(place, there, lanes)
