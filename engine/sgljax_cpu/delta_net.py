"""Gated delta nets on CPUs, token by token: the convolution of heads, and the delta rule.

Prefill, decode and scoring run the same code, so a sequence has the same bits wherever it is cut. A
token reads a head's state twice, but from memory once: the second time the cache has it.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sgljax_cpu.elementwise import FUNCTIONS
from sgljax_cpu.emit import F32, I64, PTR, VOID, Code, Module, Value, f32, vector
from sgljax_cpu.machine import Vectors
from sgljax_cpu.math import exp
from sgljax_cpu.operation import Operation, Plan, Shapes, read_values
from sgljax_cpu.primitive import run, run_one
from sgljax_cpu.rows import VectorAt, in_vectors

_BLOCK = 8
"""Vectors of a state's row that are summed at once: enough sums to wait for none."""

_LINE = 16
"""Numbers of a cache line."""


def net_heads(
    window: jax.Array, weight: jax.Array, num_key_heads: int, key_dim: int, eps: float
) -> jax.Array:
    """Queries, keys and values of tokens [N, T, C], inside a program.

    A causal depthwise convolution and silu; queries and keys are normalised, queries scaled.

    Args:
        window: [N, W - 1 + T, C] float32, blocks of tokens and those before them.
        weight: [W, C] float32.
        num_key_heads: Heads of queries and keys, the first channels.
        key_dim: Channels of each.
        eps: Added to the sum of squares that they are normalised by.
    """
    blocks, size, channels = window.shape
    operation = _heads_operation(num_key_heads, key_dim, weight.shape[0], eps)
    shape = (blocks, size - weight.shape[0] + 1, channels)
    return run_one(operation, [window, weight], jax.ShapeDtypeStruct(shape, jnp.float32))


def delta_rule(
    states: jax.Array,
    heads: jax.Array,
    decay: jax.Array,
    rate: jax.Array,
    slots: jax.Array,
    is_first: jax.Array,
    num_key_heads: int,
) -> tuple[jax.Array, jax.Array]:
    """Applies the delta rule to tokens one after another, inside a program.

    Args:
        states: [S, V, h, d] float32, updated in place.
        heads: [T, C] float32, of `net_heads`.
        decay: [T, V] float32, at most 0.
        rate: [T, V] float32.
        slots: [T] int32, the state of each token; beyond the pool for what is no token.
        is_first: [T] int32, 1 for tokens whose state begins from zeros.
        num_key_heads: Heads of queries and keys.

    Returns:
        The states, and outputs [T, V, d] float32, 0 for what is no token.
    """
    _, num_heads, key_dim, value_dim = states.shape
    out = jax.ShapeDtypeStruct((slots.shape[0], num_heads, value_dim), jnp.float32)
    operation = _rule_operation(num_heads, num_heads // num_key_heads, key_dim, value_dim)
    arrays = [heads, decay, rate, slots, is_first, states]
    new, found = run(operation, arrays, [jax.ShapeDtypeStruct(states.shape, jnp.float32), out])
    return new, found


# ---------------------------------------------------------------------- heads


@functools.cache
def _heads_operation(num_heads: int, key_dim: int, width: int, eps: float) -> Operation:
    write = functools.partial(
        _write_heads, num_heads=num_heads, key_dim=key_dim, width=width, eps=eps
    )
    return Operation("net_heads", write, _plan_heads)


def _plan_heads(arguments: Shapes, results: Shapes, threads: int) -> Plan:
    del arguments, threads
    num_blocks, *sizes = results[0].shape
    return Plan(num_blocks, tuple(sizes))


def _write_heads(
    module: Module, vectors: Vectors, *, num_heads: int, key_dim: int, width: int, eps: float
) -> Value:
    """Writes f(values, chunk): a block."""
    lanes, num_keys = vectors.lanes, 2 * num_heads * key_dim
    with Code(module, "block", VOID, [PTR, I64]) as code:
        values, block = code.arguments
        window, weight, out, num_tokens, channels = read_values(code, values, 3, 2)
        with code.loop(0, num_tokens) as token:
            row = code.add(code.mul(block, code.add(num_tokens, width - 1)), token)
            source = code.at(window, code.mul(row, channels))
            row = code.add(code.mul(block, num_tokens), token)
            target = code.at(out, code.mul(row, channels))

            def convolved(channel: Value, vector_at: VectorAt) -> Value:
                total = code.zeros(lanes)
                for i in range(width):
                    place = code.add(channel, code.mul(channels, i))
                    x, w = (vector_at.load(code.at(base, place)) for base in (source, weight))
                    total = code.fma(x, w, total)
                return code.float_op("fmul", total, FUNCTIONS["logistic"](code, total))

            with code.loop(0, 2 * num_heads) as head:
                first = code.mul(head, key_dim)
                squares = code.variable(code.zeros(lanes))

                def store(at: Value, vector_at: VectorAt) -> None:
                    found = convolved(code.add(first, at), vector_at)
                    vector_at.store(found, code.at(target, code.add(first, at)))
                    squares.set(code.fma(found, found, squares.get()))

                in_vectors(code, Value(I64, str(key_dim)), lanes, store)
                total = code.float_op("fadd", code.sum_lanes(squares.get()), f32(eps))
                size = code.select(code.less(head, num_heads), f32(key_dim**-0.5), f32(1.0))
                scale = code.splat(code.float_op("fdiv", size, code.square_root(total)), lanes)

                def normalise(at: Value, vector_at: VectorAt) -> None:
                    place = code.at(target, code.add(first, at))
                    vector_at.store(code.float_op("fmul", vector_at.load(place), scale), place)

                in_vectors(code, Value(I64, str(key_dim)), lanes, normalise)

            def store_value(at: Value, vector_at: VectorAt) -> None:
                channel = code.add(at, num_keys)
                vector_at.store(convolved(channel, vector_at), code.at(target, channel))

            in_vectors(code, code.sub(channels, num_keys), lanes, store_value)
    return code.function


# ---------------------------------------------------------------------- the rule


@functools.cache
def _rule_operation(num_heads: int, ratio: int, key_dim: int, value_dim: int) -> Operation:
    write = functools.partial(_write_rule, ratio=ratio, key_dim=key_dim, value_dim=value_dim)
    return Operation("delta_rule", write, _plan_rule, in_place=((5, 0),))


def _plan_rule(arguments: Shapes, results: Shapes, threads: int) -> Plan:
    num_slots, num_heads, *_ = results[0].shape
    # Slots are dealt to parts, where there are fewer heads than threads.
    parts = -(-threads // num_heads)
    return Plan(num_heads * parts, (arguments[3].shape[0], num_heads, num_slots, parts))


def _write_rule(
    module: Module, vectors: Vectors, *, ratio: int, key_dim: int, value_dim: int
) -> Value:
    """Writes f(values, chunk): all tokens of some slots, for one value head."""
    lanes = math.gcd(value_dim, vectors.lanes)
    with Code(module, "head", VOID, [PTR, I64]) as code:
        values, chunk = code.arguments
        *arrays, num_tokens, num_heads, num_slots, parts = read_values(code, values, 8, 4)
        heads, decays, rates, slots, is_first, states, _, out = arrays
        head, part = code.div(chunk, parts), code.rem(chunk, parts)
        keys = code.mul(code.div(num_heads, ratio), key_dim)
        channels = code.add(code.mul(keys, 2), code.mul(num_heads, value_dim))
        query = code.mul(code.div(head, ratio), key_dim)
        value = code.add(code.mul(keys, 2), code.mul(head, value_dim))
        with code.loop(0, num_tokens) as token:
            slot = code.load_int(slots, token)
            is_token, is_own = code.less(slot, num_slots), code.equal(code.rem(slot, parts), part)
            number = code.add(code.mul(token, num_heads), head)
            target = code.at(out, code.mul(number, value_dim))
            # Whatever is in memory would go on as a hidden state.
            with code.unless(is_token), code.loop(0, value_dim, lanes) as at:
                code.store(code.zeros(lanes), code.at(target, at), 4)
            with code.when(code.both(is_token, is_own)):
                place = code.add(code.mul(slot, num_heads), head)
                state = code.at(states, code.mul(place, key_dim * value_dim))
                with (
                    code.when(code.equal(code.load_int(is_first, token), 1)),
                    code.loop(0, key_dim * value_dim, lanes) as at,
                ):
                    code.store(code.zeros(lanes), code.at(state, at), 4)
                own = code.at(heads, code.mul(token, channels))
                decay, rate = (
                    code.splat(code.load(code.at(base, number), F32), lanes)
                    for base in (decays, rates)
                )
                following = code.load_int(
                    slots, code.min(code.add(token, 1), code.sub(num_tokens, 1))
                )
                ahead = code.mul(
                    code.add(code.mul(following, num_heads), head), key_dim * value_dim
                )
                rule = _Rule(
                    code,
                    state,
                    code.at(states, ahead),
                    code.at(own, query),
                    code.at(own, code.add(keys, query)),
                    code.at(own, value),
                    exp(code, decay),
                    rate,
                    target,
                )
                for start in range(0, value_dim, _BLOCK * lanes):
                    stop = min(start + _BLOCK * lanes, value_dim)
                    rule.write(range(start, stop, lanes), key_dim, value_dim, lanes)
    return code.function


class _Rule(NamedTuple):
    """The rule for a token of a head; all but `keep` and `rate` are addresses.

    `ahead` is the state of the next token, which is prefetched; it may be invalid.
    """

    code: Code
    state: Value
    ahead: Value
    q: Value
    k: Value
    v: Value
    keep: Value
    rate: Value
    out: Value

    def write(self, columns: range, key_dim: int, value_dim: int, lanes: int) -> None:
        """Writes it for some columns of the state; each sum is over its rows, in order."""
        code, kind = self.code, vector(lanes)
        known, read = ([code.variable(code.zeros(lanes)) for _ in columns] for _ in range(2))

        def at(row: Value, column: int, state: Value = self.state) -> Value:
            return code.at(state, code.add(code.mul(row, value_dim), column))

        def number(base: Value, row: Value) -> Value:
            return code.splat(code.load(code.at(base, row), F32), lanes)

        def prefetch(row: Value, columns: range) -> None:
            for column in range(columns.start, columns.stop, _LINE):
                code.prefetch(at(row, column, self.ahead))

        with code.loop(0, key_dim) as row:
            prefetch(row, columns[: len(columns) // 2])
            k = number(self.k, row)
            for column, total in zip(columns, known, strict=True):
                total.set(code.fma(k, code.load(at(row, column), kind, 4), total.get()))
        changes = []
        for column, total in zip(columns, known, strict=True):
            left = code.float_op("fmul", self.keep, total.get())
            new = code.load(code.at(self.v, column), kind, 4)
            changes.append(code.float_op("fmul", self.rate, code.float_op("fsub", new, left)))
        with code.loop(0, key_dim) as row:
            prefetch(row, columns[len(columns) // 2 :])
            k, q = number(self.k, row), number(self.q, row)
            for column, total, change in zip(columns, read, changes, strict=True):
                old = code.float_op("fmul", self.keep, code.load(at(row, column), kind, 4))
                new = code.fma(k, change, old)
                code.store(new, at(row, column), 4)
                total.set(code.fma(q, new, total.get()))
        for column, total in zip(columns, read, strict=True):
            code.store(total.get(), code.at(self.out, column), 4)
