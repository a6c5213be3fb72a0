"""How JAX sees operations: as a primitive.

Programs that contain it compile to a chain of one operation; `fusion` joins neighbouring ones into
longer chains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import mlir

from sgljax_cpu.chain import Step, run_chain
from sgljax_cpu.operation import Operation, Shapes


def run(
    operation: Operation,
    arguments: Sequence[jax.Array | np.ndarray],
    results: Sequence[jax.ShapeDtypeStruct],
) -> list[jax.Array]:
    """Computes an operation, inside a program.

    Args:
        operation: The operation.
        arguments: Arrays that it reads.
        results: Shapes and dtypes that it makes.
    """
    return OPERATION.bind(*arguments, operation=operation, results=tuple(results))


def run_one(
    operation: Operation, arguments: Sequence[jax.Array], result: jax.ShapeDtypeStruct
) -> jax.Array:
    """`run` of an operation with one result."""
    return run(operation, arguments, [result])[0]


OPERATION = core.Primitive("cpu_operation")
"""The primitive. Parameters: `operation`, and `results`, a tuple of ShapeDtypeStruct."""

OPERATION.multiple_results = True


@OPERATION.def_abstract_eval
def _abstract(*_: Any, operation: Operation, results: Shapes) -> list[Any]:
    del operation
    return [ShapedArray(x.shape, x.dtype) for x in results]


@OPERATION.def_impl
def _run_now(*arguments: jax.Array, operation: Operation, results: Shapes) -> list[jax.Array]:
    return jax.jit(lambda *xs: run(operation, xs, results))(*arguments)


def _lower(*arguments: jax.Array, operation: Operation, results: Shapes) -> list[jax.Array]:
    count = len(arguments)
    made = tuple(range(count, count + len(results)))
    taken = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments)
    step = Step(operation, tuple(range(count)), made, taken, results)
    return run_chain([step], dict(enumerate(arguments)), made)


mlir.register_lowering(OPERATION, mlir.lower_fun(_lower, multiple_results=True), platform="cpu")
