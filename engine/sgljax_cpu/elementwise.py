"""Elementwise arithmetic, on CPUs, in float32: what lies between other operations of a chain.

An expression is compiled to one loop. Each of its steps is rounded, whatever surrounds it: a
product is never fused with a sum. So an element has the same bits in any array.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from sgljax_cpu.emit import I64, PTR, VOID, Code, Module, Value, f32, lanes_of
from sgljax_cpu.machine import Vectors
from sgljax_cpu.math import exp, tanh
from sgljax_cpu.operation import Operation, Plan, Shapes, read_values
from sgljax_cpu.rows import VectorAt, in_vectors, rows_of_chunk


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
    lanes = lanes_of(x.type)
    one = code.splat(f32(1.0), lanes)
    grown = _exp(code, code.negative(x))
    return code.float_op("fdiv", one, code.float_op("fadd", one, grown))


def _exp(code: Code, x: Value) -> Value:
    lanes = lanes_of(x.type)
    limit = code.splat(f32(-88.0), lanes)
    return exp(code, code.negative(code.float_max(code.negative(x), limit)))


def _select(code: Code, condition: Value, no: Value, yes: Value) -> Value:
    return code.select(condition, yes, no)


def _op(how: str) -> Callable[..., Value]:
    def apply(code: Code, a: Value, b: Value) -> Value:
        return code.float_op(how, a, b)

    return apply


FUNCTIONS: Mapping[str, Callable[..., Value]] = {
    "add": _op("fadd"),
    "sub": _op("fsub"),
    "mul": _op("fmul"),
    "div": _op("fdiv"),
    "max": Code.float_max,
    "neg": Code.negative,
    "sqrt": Code.square_root,
    "tanh": tanh,
    "logistic": _logistic,
    "square": _power(2),
    "cube": _power(3),
    "select_n": _select,
}
"""Functions of vectors, named as JAX's primitives where these have no parameters."""


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

            def one(at: Value, vector_at: VectorAt) -> None:
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
                    if part.dtype == "bool":
                        return vector_at.load_conditions(code.at(base, index, "i8"))
                    return vector_at.load(code.at(base, index))

                vector_at.store(compute(expression), code.at(places[-1], code.add(begin, at)))

            in_vectors(code, size, lanes, one)
    return code.function


def _load_one(code: Code, base: Value, index: Value, dtype: str, lanes: int) -> Value:
    if dtype == "bool":
        found = code.load(code.at(base, index, "i8"), "i8")
        return code.splat(code.compare("ne", found, Value("i8", "0")), lanes)
    return code.splat(code.load(code.at(base, index), "float"), lanes)
