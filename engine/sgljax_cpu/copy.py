"""Copies float32 arrays on CPUs, and checks that all values are finite.

While values are in registers, the kernel sums them, each times 0: the sum is NaN if a value is NaN
or infinite, and else 0. This costs next to nothing, since the copy is bound by memory.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sgljax_cpu.emit import F32, I64, PTR, VOID, Code, Module, Value, f32, vector
from sgljax_cpu.machine import Vectors
from sgljax_cpu.operation import Operation, Plan, Shapes, read_values
from sgljax_cpu.primitive import run

_CHUNK = 1 << 15
"""Floats that a thread copies at a time."""

_VECTORS = 4
"""Vectors in flight at a time, so that no sum waits for another."""


def copy(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A copy of a float32 array of any shape, and bool []: whether all values are finite."""
    results = [jax.ShapeDtypeStruct((x.size,), x.dtype), flags_of(-(-x.size // _CHUNK))]
    copied, flags = run(_COPY, [x.reshape(-1)], results)
    return copied.reshape(x.shape), are_unset(flags)


def flags_of(num_chunks: int) -> jax.ShapeDtypeStruct:
    """A float32 for each chunk: 0, or NaN if the chunk has a value that is not finite."""
    return jax.ShapeDtypeStruct((num_chunks,), jnp.float32)


def are_unset(flags: jax.Array) -> jax.Array:
    """Bool []: whether no flag is set."""
    return jnp.all(flags == 0)


class SeenValues:
    """Tracks whether a chunk's values are finite, in the code of the chunk."""

    def __init__(self, code: Code, lanes: int) -> None:
        self._code = code
        self._zeros, self._zero = code.variable(code.zeros(lanes)), code.variable(f32(0.0))

    def add_zeros(self, zeros: Value) -> None:
        """Adds a vector of values times 0."""
        self._zeros.set(self._code.float_op("fadd", self._zeros.get(), zeros))

    def add_one(self, value: Value) -> None:
        """Adds a single value."""
        self._zero.set(self._code.fma(value, f32(0.0), self._zero.get()))

    def store_flag(self, flags: Value, chunk: Value) -> None:
        """Stores the chunk's flag at its end."""
        code = self._code
        total = code.float_op("fadd", code.sum_lanes(self._zeros.get()), self._zero.get())
        code.store(total, code.at(flags, chunk))


def _plan(arguments: Shapes, results: Shapes, threads: int) -> Plan:
    del arguments, threads
    return Plan(results[1].shape[0], results[0].shape)


def _write(module: Module, vectors: Vectors) -> Value:
    """Writes f(values, chunk): a run of adjacent floats."""
    lanes = vectors.lanes
    step = _VECTORS * lanes
    with Code(module, "copy", VOID, [PTR, I64]) as code:
        values, chunk = code.arguments
        x, y, flags, size = read_values(code, values, 3, 1)
        begin = code.mul(chunk, _CHUNK)
        end = code.min(code.add(begin, _CHUNK), size)
        whole_end = code.add(begin, code.mul(code.div(code.sub(end, begin), step), step))
        seen = SeenValues(code, lanes)
        with code.loop(begin, whole_end, step) as place:
            products: list[Value] = []
            for i in range(_VECTORS):
                index = code.add(place, i * lanes)
                row = code.load(code.at(x, index), vector(lanes), 4)
                code.store(row, code.at(y, index), 4)
                products.append(code.float_op("fmul", row, code.zeros(lanes)))
            while len(products) > 1:
                products = [
                    code.float_op("fadd", a, b)
                    for a, b in zip(products[::2], products[1::2], strict=True)
                ]
            seen.add_zeros(products[0])
        with code.loop(whole_end, end) as place:
            value = code.load(code.at(x, place), F32)
            code.store(value, code.at(y, place))
            seen.add_one(value)
        seen.store_flag(flags, chunk)
    return code.function


_COPY = Operation("copy", _write, _plan)
