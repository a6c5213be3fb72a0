"""Copies float32 arrays on CPUs, and checks that all values are finite.

While values are in registers, the kernel sums them, each times 0: the sum is NaN if a value is NaN
or infinite, and else 0. This costs next to nothing, since the copy is bound by memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from sgljax_engine.kernels.cpu.emit import F32, I64, PTR, VOID, Code, Module, Value, f32, vector
from sgljax_engine.kernels.cpu.ffi import Buffer, Job, Operation, read_values, register
from sgljax_engine.kernels.cpu.machine import Vectors

_CHUNK = 1 << 15
"""Floats that a thread copies at a time."""

_VECTORS = 4
"""Vectors in flight at a time, so that no sum waits for another."""


def copy(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A copy of a float32 array of any shape, and bool []: whether all values are finite."""
    results = jax.ShapeDtypeStruct((x.size,), x.dtype), jax.ShapeDtypeStruct((), x.dtype)
    copied, flag = jax.ffi.ffi_call(register(_COPY), results)(x.reshape(-1))
    return copied.reshape(x.shape), is_unset(flag)


def is_unset(flag: jax.Array) -> jax.Array:
    """Bool []: whether a flag of float32 [] is as `clear_flag` left it."""
    return flag == 0


def clear_flag(code: Code, flag: Value) -> None:
    """Clears the flag before the chunks run; chunks set it to NaN."""
    code.store(f32(0.0), flag)


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

    def set_flag(self, flag: Value) -> None:
        """Sets the flag at the end of a chunk. Threads may race: all write the same value."""
        code = self._code
        total = code.float_op("fadd", code.sum_lanes(self._zeros.get()), self._zero.get())
        with code.when(code.float_compare("uno", total, total)):
            code.store(total, flag)


def _plan(code: Code, buffers: Sequence[Buffer], threads: Value) -> Job:
    del threads
    x, y, flag = buffers
    clear_flag(code, flag.data)
    size = x.dim(0)
    return Job(code.ceil_div(size, _CHUNK), [x.data, y.data, flag.data, size])


def _write_chunk(module: Module, vectors: Vectors) -> Value:
    """Writes f(values, chunk): a run of adjacent floats."""
    lanes = vectors.lanes
    step = _VECTORS * lanes
    with Code(module, "copy", VOID, [PTR, I64]) as code:
        values, chunk = code.arguments
        x, y, flag, size = read_values(code, values, 3, 1)
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
        seen.set_flag(flag)
    return code.function


_COPY = Operation("copy", 1, 2, _write_chunk, _plan)
