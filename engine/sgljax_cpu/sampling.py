"""Sums of sampling over the vocabulary, on CPUs, in float32.

A row is cut into *parts*, which threads share, and these into *blocks*. Sums go over a block's
lanes, then over blocks in order, so that a row has the same bits in any batch. Exponentials are
those of logits less the row's largest one, over its temperature; a temperature of 0 counts as 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sgljax_cpu.emit import (
    F32,
    I32,
    I64,
    PTR,
    VOID,
    Code,
    Module,
    Value,
    Variable,
    f32,
    i32,
)
from sgljax_cpu.machine import Vectors
from sgljax_cpu.math import log
from sgljax_cpu.operation import Operation, Plan, Shapes, read_values
from sgljax_cpu.primitive import run
from sgljax_cpu.sampling_row import (
    BLOCK,
    PART,
    Row,
    divisor_of,
    part_of_row,
    plan_rows,
)

_LOWEST = float("-inf")


class Peaks(NamedTuple):
    """The largest logits of each part of each row.

    Shape: values: [B, parts] float32. indices: [B, parts] int32, the first of the row's tokens with
        that logit.
    """

    values: jax.Array
    indices: jax.Array


def find_peaks(logits: jax.Array) -> Peaks:
    """The largest logits [B, V] float32 by part, inside a program."""
    assert logits.dtype == jnp.float32, logits.dtype
    shape = (logits.shape[0], -(-logits.shape[1] // PART))
    results = [jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.float32, jnp.int32)]
    return Peaks(*run(_PEAKS, [logits], results))


def sum_weights(
    logits: jax.Array, peaks: Peaks, temperature: jax.Array, threshold: jax.Array
) -> jax.Array:
    """Sums of the exponentials of logits at or above a threshold, inside a program.

    Args:
        logits: [B, V] float32.
        peaks: Of the logits.
        temperature: [B] float32.
        threshold: [B] float32, the smallest logit that counts.

    Returns:
        [B, ceil(V / 128)] float32, a sum for each block.
    """
    result = jax.ShapeDtypeStruct((logits.shape[0], -(-logits.shape[1] // BLOCK)), jnp.float32)
    return run(_SUMS, [logits, peaks.values, temperature, threshold], [result])[0]


def draw(
    logits: jax.Array,
    peaks: Peaks,
    sums: jax.Array,
    temperature: jax.Array,
    threshold: jax.Array,
    uniform: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Draws a token of each row by inverting its cumulative distribution, inside a program.

    Args:
        logits: [B, V] float32.
        peaks: Of the logits.
        sums: From `sum_weights`.
        temperature: [B] float32; 0 takes the first token with the largest logit.
        threshold: [B] float32, the smallest logit that can be drawn.
        uniform: [B] float32 in (0, 1).

    Returns:
        Tokens [B] int32, and their log-probs [B] float32 in the distribution, 0 of greedy ones.
    """
    rows = (logits.shape[0],)
    results = [jax.ShapeDtypeStruct(rows, dtype) for dtype in (jnp.int32, jnp.float32)]
    arguments = [logits, *peaks, sums, temperature, threshold, uniform]
    token, logprob = run(_DRAW, arguments, results)
    return token, logprob


def logprobs(
    logits: jax.Array, peaks: Peaks, sums: jax.Array, temperature: jax.Array, ids: jax.Array
) -> jax.Array:
    """Log-probs [B, I] float32 of tokens in the distribution at a temperature, inside a program.

    Args:
        logits: [B, V] float32.
        peaks: Of the logits.
        sums: From `sum_weights` with a threshold of -inf, at the temperature.
        temperature: [B] float32.
        ids: [B, I] int32, in range.
    """
    result = jax.ShapeDtypeStruct(ids.shape, jnp.float32)
    return run(_LOGPROBS, [logits, peaks.values, sums, temperature, ids], [result])[0]


def _by_part(arguments: Shapes, results: Shapes, threads: int) -> Plan:
    del results, threads
    num_rows, size = arguments[0].shape
    return Plan(num_rows * -(-size // PART), (size,))


# ---------------------------------------------------------------------- peaks


def _write_peaks(module: Module, vectors: Vectors) -> Value:
    """Writes f(values, chunk): a part of a row."""
    lanes = vectors.lanes
    with Code(module, "part", VOID, [PTR, I64]) as code:
        values, chunk = code.arguments
        logits, peaks, indices, size = read_values(code, values, 3, 1)
        row, begin, end = part_of_row(code, chunk, size)
        this = Row(code, lanes, logits, row, size, None)
        lowest = code.splat(f32(_LOWEST), lanes)
        found = code.variable(lowest)
        # For each lane the first place, within the part, of the largest logit.
        places = code.variable(code.splat(i32(0), lanes))

        def take(at: Value, values: Value, there: Value) -> None:
            values = code.select(there, values, lowest)
            is_larger = code.float_compare("ogt", values, found.get())
            first = code.splat(code.convert("trunc", code.sub(at, begin), I32), lanes)
            here = code.add(first, code.lane_numbers(lanes))
            places.set(code.select(is_larger, here, places.get()))
            found.set(code.float_max(found.get(), values))

        this.in_vectors(begin, end, take)
        peak = code.max_lanes(found.get())
        is_peak = code.float_compare("oeq", found.get(), code.splat(peak, lanes))
        nowhere = code.splat(i32(PART), lanes)
        candidates = code.select(is_peak, places.get(), nowhere)
        nearest = code.intrinsic(f"llvm.vector.reduce.smin.v{lanes}i32", I32, [candidates])
        # No lane equals a peak that is NaN: the first logit stands for it.
        nearest = code.select(code.less(nearest, i32(PART)), nearest, i32(0))
        place = code.add(begin, code.convert("sext", nearest, I64))
        code.store(peak, code.at(peaks, chunk))
        code.store(code.convert("trunc", place, I32), code.at(indices, chunk, I32))
    return code.function


# ---------------------------------------------------------------------- sums


def _write_sums(module: Module, vectors: Vectors) -> Value:
    """Writes f(values, chunk): a part of a row."""
    lanes = vectors.lanes
    with Code(module, "part", VOID, [PTR, I64]) as code:
        values, chunk = code.arguments
        logits, peaks, temperature, threshold, sums, size = read_values(code, values, 5, 1)
        row, begin, end = part_of_row(code, chunk, size)
        this = Row(code, lanes, logits, row, size, peaks)
        divisor = divisor_of(code, temperature, row)
        least = code.load(code.at(threshold, row), F32)
        num_blocks = code.ceil_div(size, BLOCK)
        with code.loop(begin, end, BLOCK) as block:
            total = code.variable(code.zeros(lanes))

            def add(total: Variable, at: Value, values: Value, there: Value) -> None:
                del at
                weights = this.weights(values, there, divisor, least)
                total.set(code.float_op("fadd", total.get(), weights))

            block_end = code.min(code.add(block, BLOCK), end)
            this.in_vectors(block, block_end, functools.partial(add, total))
            place = code.add(code.mul(row, num_blocks), code.div(block, BLOCK))
            code.store(code.sum_lanes(total.get()), code.at(sums, place))
    return code.function


def _total_of(code: Code, sums: Value, row: Value, num_blocks: Value) -> Value:
    """The sum over a row's blocks, in order."""
    total = code.variable(f32(0.0))
    with code.loop(0, num_blocks) as block:
        place = code.add(code.mul(row, num_blocks), block)
        total.set(code.float_op("fadd", total.get(), code.load(code.at(sums, place), F32)))
    return total.get()


def _log_of(code: Code, value: Value, lanes: int) -> Value:
    """The log of a normal number > 0, or NaN, which `log` takes for a number."""
    found = code.lane(log(code, code.splat(value, lanes)), 0)
    return code.select(code.float_compare("uno", value, value), value, found)


# ---------------------------------------------------------------------- drawing


def _write_draw(module: Module, vectors: Vectors) -> Value:
    """Writes f(values, chunk): a row."""
    lanes = vectors.lanes
    with Code(module, "row", VOID, [PTR, I64]) as code:
        values, row = code.arguments
        arrays = read_values(code, values, 9, 1)
        logits, peaks, indices, sums, temperature, threshold, uniform = arrays[:7]
        tokens, logprobs, size = arrays[7:]
        this = Row(code, lanes, logits, row, size, peaks)
        divisor = divisor_of(code, temperature, row)
        num_blocks = code.ceil_div(size, BLOCK)
        total = _total_of(code, sums, row, num_blocks)
        is_greedy = code.float_compare("oeq", code.load(code.at(temperature, row), F32), f32(0.0))
        token = code.variable(0)
        with code.when(is_greedy):
            first = code.mul(row, this.num_parts)
            part = _first_equal(code, code.at(peaks, first), this.num_parts, this.peak)
            token.set(code.load_int(indices, code.add(first, part)))
        with code.unless(is_greedy):
            target = code.float_op("fmul", code.load(code.at(uniform, row), F32), total)
            first = code.at(sums, code.mul(row, num_blocks))

            def sum_of(block: Value) -> Value:
                return code.load(code.at(first, block), F32)

            block, start = _first_above(code, sum_of, num_blocks, target)
            begin = code.mul(block, BLOCK)
            end = code.min(code.add(begin, BLOCK), size)
            kept = code.stack(f"[{BLOCK} x float]")
            least = code.load(code.at(threshold, row), F32)

            def keep(at: Value, values: Value, there: Value) -> None:
                place = code.at(kept, code.sub(at, begin))
                code.store(this.weights(values, there, divisor, least), place, 4)

            this.in_vectors(begin, end, keep)
            left = code.float_op("fsub", target, start)
            offset, _ = _first_above(
                code, lambda i: code.load(code.at(kept, i), F32), code.sub(end, begin), left
            )
            token.set(code.add(begin, offset))
        code.store(code.convert("trunc", token.get(), I32), code.at(tokens, row, I32))
        scaled = this.scaled_at(token.get(), divisor)
        found = code.float_op("fsub", scaled, _log_of(code, total, lanes))
        code.store(code.select(is_greedy, f32(0.0), found), code.at(logprobs, row))
    return code.function


def _first_equal(code: Code, values: Value, count: Value, wanted: Value) -> Value:
    """The first index of a value; 0 if there is none."""
    found, at = code.variable(0), code.variable(0)
    with code.repeat(lambda: code.less(at.get(), count)):
        is_it = code.float_compare("oeq", code.load(code.at(values, at.get()), F32), wanted)
        found.set(code.select(is_it, at.get(), found.get()))
        at.set(code.select(is_it, count, code.add(at.get(), 1)))
    return found.get()


def _first_above(
    code: Code, weight: Callable[[Value], Value], count: Value, target: Value
) -> tuple[Value, Value]:
    """The first index with a weight and a cumulative one above the target, and the sum before it.

    By rounding there may be none: then the last one with a weight.
    """
    total, before = code.variable(f32(0.0)), code.variable(f32(0.0))
    found, at = code.variable(0), code.variable(0)
    with code.repeat(lambda: code.less(at.get(), count)):
        one = weight(at.get())
        grown = code.float_op("fadd", total.get(), one)
        is_there = code.float_compare("ogt", one, f32(0.0))
        found.set(code.select(is_there, at.get(), found.get()))
        before.set(code.select(is_there, total.get(), before.get()))
        is_above = code.both(is_there, code.float_compare("ogt", grown, target))
        total.set(grown)
        at.set(code.select(is_above, count, code.add(at.get(), 1)))
    return found.get(), before.get()


# ---------------------------------------------------------------------- log-probs


def _write_logprobs(module: Module, vectors: Vectors) -> Value:
    """Writes f(values, chunk): a row."""
    lanes = vectors.lanes
    with Code(module, "row", VOID, [PTR, I64]) as code:
        values, row = code.arguments
        logits, peaks, sums, temperature, ids, found, size, num_ids = read_values(
            code, values, 6, 2
        )
        this = Row(code, lanes, logits, row, size, peaks)
        divisor = divisor_of(code, temperature, row)
        total = _total_of(code, sums, row, code.ceil_div(size, BLOCK))
        normalizer = _log_of(code, total, lanes)
        with code.loop(0, num_ids) as index:
            place = code.add(code.mul(row, num_ids), index)
            scaled = this.scaled_at(code.load_int(ids, place), divisor)
            code.store(code.float_op("fsub", scaled, normalizer), code.at(found, place))
    return code.function


_PEAKS = Operation("peaks", _write_peaks, _by_part)
_SUMS = Operation("sum_weights", _write_sums, _by_part)
_DRAW = Operation("draw", _write_draw, plan_rows)
_LOGPROBS = Operation("logprobs", _write_logprobs, functools.partial(plan_rows, wide=4))
