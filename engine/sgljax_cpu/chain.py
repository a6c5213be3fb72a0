"""Chains of operations: what one foreign function call computes.

Operations that do not depend on one another share a phase (`threads`). What only later operations
of the chain read lies in scratch memory, in which a value takes the place of one that is no longer
needed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sgljax_cpu.abi import load_api
from sgljax_cpu.emit import I64, NULL, PTR, VOID, Code, Module
from sgljax_cpu.machine import (
    Vectors,
    compile_module,
    host_vectors,
    missing,
)
from sgljax_cpu.operation import Operation, Shapes, num_threads
from sgljax_cpu.table import Pointer, Work, encode
from sgljax_cpu.threads import compile_threads, declare_run

_ALIGNMENT = 64
"""Bytes of a cache line: values in scratch memory start at one."""


class Step(NamedTuple):
    """One operation of a chain; its arguments and results are numbers of values.

    Attributes:
        operation: The operation.
        arguments: Values that it reads.
        results: Values that it makes.
        taken: Shapes and dtypes of the arguments, as the operation sees them.
        made: Shapes and dtypes of the results.
    """

    operation: Operation
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    taken: Shapes
    made: Shapes


def run_chain(
    steps: Sequence[Step], arrays: Mapping[int, jax.Array], kept: Sequence[int]
) -> list[jax.Array]:
    """Computes a chain in one call, inside a program.

    Args:
        steps: Operations, each after those whose results it reads.
        arrays: The values from outside.
        kept: Results to return.
    """
    inputs = sorted(arrays)
    shapes = {n: shape for step in steps for n, shape in zip(step.results, step.made, strict=True)}
    owner = _owners(steps)
    # Updated inputs leave the call as results of their own.
    updated = [own for number, own in owner.items() if own != number]
    assert len(set(updated)) == len(updated), "an array is updated once in a chain"
    outputs = sorted({*kept, *(n for n, own in owner.items() if own != n and own in arrays)})
    phases = _phases(steps, owner)
    places, scratch_bytes = _scratch(phases, shapes, {*inputs, *outputs}, owner)

    buffers = {number: Pointer(index) for index, number in enumerate(inputs)}
    buffers |= {number: Pointer(len(inputs) + index) for index, number in enumerate(outputs)}
    scratch = len(inputs) + len(outputs)
    buffers |= {number: Pointer(scratch, offset) for number, offset in places.items()}
    for number, own in owner.items():
        buffers.setdefault(number, buffers[own])

    kernels: list[Operation] = list(dict.fromkeys(step.operation for step in steps))
    work: list[list[Work]] = []
    for phase in phases:
        works = []
        for step in phase:
            plan = step.operation.plan(step.taken, step.made, num_threads())
            pointers = [buffers[n] for n in (*step.arguments, *step.results)]
            kernel = kernels.index(step.operation)
            works.append(Work(kernel, plan.num_chunks, [*pointers, *plan.sizes]))
        work.append(works)

    results = [shapes[number] for number in outputs]
    if scratch_bytes:
        results.append(jax.ShapeDtypeStruct((scratch_bytes,), jnp.uint8))
    aliases = {
        inputs.index(own): outputs.index(number)
        for number, own in owner.items()
        if own != number and own in arrays
    }
    call = jax.ffi.ffi_call(_register(kernels), results, input_output_aliases=aliases)
    table = np.asarray(encode(work), np.int64)
    found = call(*(arrays[number] for number in inputs), table=table)
    by_number = dict(zip(outputs, found, strict=False))
    return [by_number[number] for number in kept]


def _owners(steps: Sequence[Step]) -> dict[int, int]:
    """The value whose memory each result has: its own, or that of the argument it updates."""
    owner: dict[int, int] = {}
    for step in steps:
        updated = {result: argument for argument, result in step.operation.in_place}
        for index, number in enumerate(step.results):
            argument = step.arguments[updated[index]] if index in updated else number
            owner[number] = owner.get(argument, argument)
    return owner


def _phases(steps: Sequence[Step], owner: Mapping[int, int]) -> list[list[Step]]:
    """The steps in order, those together that do not depend on one another."""
    phases: list[list[Step]] = []
    made: set[int] = set()
    read: set[int] = set()
    for step in steps:
        reads = {owner.get(number, number) for number in step.arguments}
        makes = {owner[number] for number in step.results}
        if not phases or reads & made or makes & read:
            phases.append([])
            made, read = set(), set()
        phases[-1].append(step)
        made |= makes
        read |= reads
    return phases


def _scratch(
    phases: Sequence[Sequence[Step]],
    shapes: Mapping[int, jax.ShapeDtypeStruct],
    elsewhere: Iterable[int],
    owner: Mapping[int, int],
) -> tuple[dict[int, int], int]:
    """Offsets of values in scratch memory, and its bytes: the first gap that is large enough.

    A phase's values are all alive throughout it, since its steps run at once.
    """
    elsewhere = set(elsewhere)
    last: dict[int, int] = {}
    for index, phase in enumerate(phases):
        for step in phase:
            for number in (*step.arguments, *step.results):
                last[owner.get(number, number)] = index
    taken: dict[int, tuple[int, int]] = {}
    places: dict[int, int] = {}
    total = 0
    for index, phase in enumerate(phases):
        taken = {number: span for number, span in taken.items() if last[number] >= index}
        for step in phase:
            for number in step.results:
                if number in elsewhere or owner[number] != number:
                    continue
                size = math.prod(shapes[number].shape) * shapes[number].dtype.itemsize
                size = -(-size // _ALIGNMENT) * _ALIGNMENT
                at = 0
                for begin, end in sorted(taken.values()):
                    if at + size <= begin:
                        break
                    at = max(at, end)
                taken[number] = (at, at + size)
                places[number] = at
                total = max(total, at + size)
    return places, total


# ---------------------------------------------------------------------- registration


@functools.cache
def unavailable() -> str | None:
    """Why this process has no JIT-compiled CPU kernels; None if it has them."""
    reason = missing()
    if reason is not None:
        return reason
    api = load_api()
    if isinstance(api, str):
        return api
    try:
        compile_threads(api, host_vectors())
    except Exception as error:  # from an untested version of llvmlite
        return f"llvmlite makes no code here: {error}"
    return None


def _register(kernels: Sequence[Operation]) -> str:
    """Registers the handler of a chain with XLA for CPUs; returns the name to call it by.

    The name identifies the code, since compiled programs on disk call the handler by name.
    """
    with _REGISTERING:  # XLA refuses a name that it has already
        return _registered(tuple(kernels), host_vectors())


_REGISTERING = threading.Lock()


@functools.cache
def _registered(kernels: tuple[Operation, ...], vectors: Vectors) -> str:
    import llvmlite.binding as llvm

    api = load_api()
    assert not isinstance(api, str), api
    symbols: dict[str, int] = dict(compile_threads(api, vectors))
    names = []
    for kernel in kernels:
        text = kernel_text(kernel, vectors)
        names.append(f"sgljax_{hashlib.sha256(text.encode()).hexdigest()[:16]}")
        symbols[names[-1]] = compile_module(text, vectors, (_KERNEL,))[_KERNEL]
    text = handler_text(tuple(names))
    if text in _HANDLERS:
        return _HANDLERS[text]
    for symbol, address in symbols.items():
        llvm.add_symbol(symbol, address)
    address = compile_module(text, vectors, (_HANDLER,))[_HANDLER]
    handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)
    listed = list(dict.fromkeys(kernel.name for kernel in kernels))
    described = ".".join(listed if len(listed) <= _NAMED else [*listed[:_NAMED], "more"])
    target = f"sgljax.{described}.{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="cpu")
    _HANDLERS[text] = target
    return target


_HANDLERS: dict[str, str] = {}
"""Names of registered handlers by their code."""

_KERNEL, _HANDLER = "kernel", "handler"
_NAMED = 3


@functools.cache
def kernel_text(operation: Operation, vectors: Vectors) -> str:
    """The LLVM IR of an operation's kernel."""
    module = Module()
    function = operation.write(module, vectors)
    with Code(module, _KERNEL, VOID, [PTR, I64], is_public=True) as code:
        code.call(function, VOID, code.arguments)
    return module.text


@functools.cache
def handler_text(names: tuple[str, ...]) -> str:
    """The LLVM IR of the handler of a chain, which XLA calls with a call frame.

    Args:
        names: Symbols of the kernels.
    """
    module = Module()
    run = declare_run(module)
    functions = [module.declare(name, VOID, [PTR, I64]) for name in names]
    table = module.constant("functions", PTR, functions)
    with Code(module, _HANDLER, PTR, [PTR], is_public=True) as code:
        code.call(run, VOID, [code.arguments[0], table])
        code.ret(NULL)
    return module.text
