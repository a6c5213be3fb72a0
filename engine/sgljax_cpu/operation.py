"""Operations: JIT-compiled CPU kernels, and how their work is split among threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import jax

from sgljax_cpu.emit import I64, PTR, Code, Module, Value
from sgljax_cpu.machine import Vectors

Shapes = tuple[jax.ShapeDtypeStruct, ...]


class Plan(NamedTuple):
    """The work of one call.

    Attributes:
        num_chunks: Number of chunks, each done by one thread.
        sizes: Integers for the kernel, which reads them behind the addresses of its arrays.
    """

    num_chunks: int
    sizes: tuple[int, ...]


class Operation(NamedTuple):
    """A JIT-compiled CPU kernel. Hashable: equal operations share their code.

    Attributes:
        name: Name of the kernel in traces.
        write: Writes the function f(values, chunk) into a module.
        plan: Splits a call into chunks: (shapes of the arguments, of the results, threads).
        in_place: Pairs (argument, result): the result is the argument's memory, updated.
    """

    name: str
    write: Callable[[Module, Vectors], Value]
    plan: Callable[[Shapes, Shapes, int], Plan]
    in_place: tuple[tuple[int, int], ...] = ()


def read_values(code: Code, values: Value, num_pointers: int, num_integers: int) -> list[Value]:
    """Reads a call's addresses of arguments and results, and its sizes, in a kernel.

    Args:
        code: Code of the kernel.
        values: The kernel's first argument.
        num_pointers: Number of arguments and results.
        num_integers: Number of sizes.
    """
    types = [PTR] * num_pointers + [I64] * num_integers
    return [code.load_field(values, 8 * place, type_) for place, type_ in enumerate(types)]


def num_threads() -> int:
    """Number of threads for which work is split; other numbers work too."""
    if hasattr(os, "sched_getaffinity"):  # macOS lacks it
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
