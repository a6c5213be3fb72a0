"""Rows of a table in panels, on CPUs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from sgljax_cpu.emit import F32, I64, PTR, VOID, Code, Module, Value
from sgljax_cpu.machine import Vectors
from sgljax_cpu.numbers import STORED, load_as_float
from sgljax_cpu.operation import Operation, Plan, Shapes, read_values
from sgljax_cpu.panels import PANEL
from sgljax_cpu.primitive import run_one


def embed(table: jax.Array, ids: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """Embeddings [T, D] float32 of tokens, inside a program.

    Args:
        table: [panels, D, 16], the packed transpose of [vocabulary, D].
        ids: [T] int32, in range.
        scale: [vocabulary] float32, factors of the tokens of an int8 table.
    """
    arrays = [table, ids] if scale is None else [table, ids, scale]
    result = jax.ShapeDtypeStruct((ids.shape[0], table.shape[1]), jnp.float32)
    return run_one(_operation(table.dtype.name), arrays, result)


@functools.cache
def _operation(dtype: str) -> Operation:
    return Operation("embed", functools.partial(_write, dtype=dtype), _plan)


def _plan(arguments: Shapes, results: Shapes, threads: int) -> Plan:
    del threads
    num_tokens, size = results[0].shape
    return Plan(num_tokens, (size,))


def _write(module: Module, vectors: Vectors, *, dtype: str) -> Value:
    """Writes f(values, chunk): a token."""
    del vectors
    with Code(module, "token", VOID, [PTR, I64]) as code:
        values, token = code.arguments
        count = 4 if dtype == "int8" else 3
        table, ids, *scale, y, size = read_values(code, values, count, 1)
        row = code.load_int(ids, token)
        first = code.add(
            code.mul(code.mul(code.div(row, PANEL), size), PANEL), code.rem(row, PANEL)
        )
        with code.loop(0, size) as channel:
            place = code.add(first, code.mul(channel, PANEL))
            found = load_as_float(code, code.at(table, place, STORED[dtype]), dtype, 1)
            if scale:
                factor = code.load(code.at(scale[0], row), F32)
                found = code.float_op("fmul", found, code.splat(factor, 1))
            target = code.at(y, code.add(code.mul(token, size), channel), F32)
            code.store(code.lane(found, 0), target)
    return code.function
