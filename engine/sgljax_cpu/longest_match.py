"""The longest match of each row's last tokens in its text, on CPUs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from sgljax_cpu.emit import (
    I1,
    I32,
    I64,
    PTR,
    VOID,
    Code,
    Module,
    Value,
    vector,
)
from sgljax_cpu.machine import Vectors
from sgljax_cpu.operation import Operation, Plan, Shapes, read_values
from sgljax_cpu.primitive import run_one


def longest_match(
    text: jax.Array, num_text: jax.Array, stops: jax.Array, ends: jax.Array, max_length: int
) -> jax.Array:
    """As `runner.programs.drafts.search_text`, inside a program.

    Behind the first `max_length` entries of a text come a multiple of 16.
    """
    result = jax.ShapeDtypeStruct(num_text.shape, jnp.int32)
    return run_one(_operation(max_length), [text, num_text, stops, ends], result)


@functools.cache
def _operation(max_length: int) -> Operation:
    write = functools.partial(_write, max_length=max_length)
    return Operation("longest_match", write, _plan)


def _plan(arguments: Shapes, results: Shapes, threads: int) -> Plan:
    del results, threads
    num_rows, size = arguments[0].shape
    return Plan(num_rows, (size, arguments[3].shape[1]))


def _write(module: Module, vectors: Vectors, *, max_length: int) -> Value:
    """Writes f(values, chunk): a row."""
    lanes = vectors.lanes
    with Code(module, "row", VOID, [PTR, I64]) as code:
        values, row = code.arguments
        texts, num_text, stops, ends, found, size, num_ends = read_values(code, values, 5, 2)
        text = code.at(texts, code.mul(row, size), I32)
        last = code.max(code.sub(code.load_int(num_text, row), 1), 0)  # of a row without a text
        stop, first_end = code.load_int(stops, row), code.mul(row, num_ends)
        wanted = code.splat(code.load(code.at(text, last, I32), I32), lanes)
        best = code.variable(0)

        def take(place: Value) -> None:
            """Compares the tokens before a place."""
            length = code.variable(1)
            goes_on = code.variable(1)
            with code.repeat(lambda: code.less(0, goes_on.get())):
                age = length.get()
                before = code.load_int(text, code.sub(code.sub(place, 1), age))
                is_same = code.equal(before, code.load_int(text, code.sub(last, age)))
                is_same = code.both(is_same, code.compare("sge", before, 0))
                length.set(code.add(age, code.convert("zext", is_same, I64)))
                is_short = code.less(length.get(), max_length)
                goes_on.set(code.convert("zext", code.both(is_same, is_short), I64))
            rank = code.variable(num_ends)
            with code.loop(0, num_ends) as part:
                end = code.load_int(ends, code.add(first_end, part))
                is_behind = code.compare("sge", place, end)
                rank.set(code.sub(rank.get(), code.convert("zext", is_behind, I64)))
            level = code.add(code.mul(length.get(), code.add(num_ends, 2)), rank.get())
            score = code.add(code.mul(level, code.add(size, 1)), place)
            has_next = code.compare("sge", code.load_int(text, place), 0)
            counts = code.both(has_next, code.less(place, stop))
            best.set(code.select(counts, code.max(score, best.get()), best.get()))

        with code.loop(max_length, stop, lanes) as place:
            entries = code.load(code.at(text, code.sub(place, 1), I32), vector(lanes, I32), 4)
            hits = code.compare("eq", entries, wanted)
            bits = code.convert("bitcast", hits, f"i{lanes}")
            left = code.variable(code.convert("zext", bits, I64))
            with code.repeat(lambda left=left: code.compare("ne", left.get(), 0)):
                lowest = code.intrinsic("llvm.cttz.i64", I64, [left.get(), Value(I1, "true")])
                take(code.add(place, lowest))
                left.set(code.both(left.get(), code.sub(left.get(), 1)))
        code.store(code.convert("trunc", best.get(), I32), code.at(found, row, I32))
    return code.function
