"""Products of tokens sorted by expert with their expert's weight in panels, on CPUs.

One call computes all experts. Each thread takes some panels of every weight, so that threads finish
together however tokens are spread over experts. Experts without tokens cost nothing. A sum has the
bits of `linear`, however many tokens an expert has.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from sgljax_cpu.emit import F32, I64, PTR, VOID, Code, Module, Value, f32
from sgljax_cpu.linear import (
    Arrays,
    PanelRange,
    chunk_panels,
    multiply,
)
from sgljax_cpu.linear_tile import write_tiles
from sgljax_cpu.machine import Vectors
from sgljax_cpu.numbers import STORED
from sgljax_cpu.operation import Operation, Plan, Shapes, read_values
from sgljax_cpu.panels import PANEL
from sgljax_cpu.primitive import run_one


def ragged_linear(
    weights: jax.Array, x: jax.Array, group_sizes: jax.Array, num_outputs: int
) -> jax.Array:
    """`x[t] @ W[e]` for each token t of each expert e, inside a program.

    Args:
        weights: [E, panels, in, 16] float32, bfloat16 or float16.
        x: [T, in] float32: first the tokens of expert 0, then those of expert 1, and so on.
        group_sizes: [E] int32, tokens of each expert; together at most T.
        num_outputs: Outputs of an expert.

    Returns:
        [T, num_outputs] float32; 0 for tokens beyond the last expert's.
    """
    assert x.dtype == jnp.float32, x.dtype
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    result = jax.ShapeDtypeStruct((x.shape[0], num_outputs), jnp.float32)
    return run_one(_operation(weights.dtype.name), [weights, x, ends], result)


@functools.cache
def _operation(dtype: str) -> Operation:
    return Operation("ragged_linear", functools.partial(_write, dtype=dtype), _plan)


def _plan(arguments: Shapes, results: Shapes, threads: int) -> Plan:
    num_experts, count, num_inputs, _ = arguments[0].shape
    num_tokens, num_outputs = results[0].shape
    size = chunk_panels(count, threads, -(-num_tokens // num_experts))
    sizes = (num_experts, num_inputs, num_tokens, num_outputs, size)
    return Plan(-(-count // size), sizes)


def _write(module: Module, vectors: Vectors, *, dtype: str) -> Value:
    """Writes f(values, chunk): some panels of all experts with their tokens."""
    tiles = write_tiles(module, vectors, dtype)
    with Code(module, "chunk", VOID, [PTR, I64]) as code:
        values, chunk = code.arguments
        weights, x, ends, y, *sizes = read_values(code, values, 4, 5)
        num_experts, num_inputs, num_tokens, num_outputs, size = sizes
        count = code.ceil_div(num_outputs, PANEL)
        first = code.mul(chunk, size)
        # The thread goes on with another expert.
        panels = PanelRange(first, code.min(code.add(first, size), count), following=count)
        per_expert = code.mul(code.mul(count, num_inputs), PANEL)
        start = code.variable(0)
        with code.loop(0, num_experts) as expert:
            end = code.load_int(ends, expert)
            with code.when(code.less(start.get(), end)):
                weight = code.at(weights, code.mul(expert, per_expert), STORED[dtype])
                arrays = Arrays(weight, x, y, num_inputs, num_outputs)
                multiply(code, tiles, arrays, panels, (start.get(), end))
                start.set(end)
        begin = code.mul(panels.first, PANEL)
        end = code.min(code.mul(panels.last, PANEL), num_outputs)
        with code.loop(start.get(), num_tokens) as token:
            place = code.at(y, code.mul(token, num_outputs))
            with code.loop(begin, end) as output:
                code.store(f32(0.0), code.at(place, output, F32))
    return code.function
