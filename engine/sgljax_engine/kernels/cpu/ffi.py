"""Registers JIT-compiled CPU kernels as XLA foreign functions, which programs call by name."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from sgljax_engine.kernels.cpu import machine
from sgljax_engine.kernels.cpu.abi import (
    BUFFER_DATA,
    BUFFER_DIMS,
    EXTENSION_KIND,
    EXTENSION_METADATA,
    FRAME_API,
    FRAME_ARGUMENTS,
    FRAME_CONTEXT,
    FRAME_EXTENSION,
    FRAME_RESULTS,
    METADATA_KIND,
    METADATA_MAJOR,
    METADATA_MINOR,
    METADATA_TRAITS,
    Api,
    load_api,
)
from sgljax_engine.kernels.cpu.emit import (
    I32,
    I64,
    NULL,
    PTR,
    VOID,
    Code,
    Module,
    Number,
    Value,
    i32,
)
from sgljax_engine.kernels.cpu.machine import Vectors, compile_module, host_vectors
from sgljax_engine.kernels.cpu.threads import (
    FUNCTION,
    VALUES,
    compile_threads,
    declare_threads,
)


class Buffer(NamedTuple):
    """An input or output array of a kernel, in the code of its handler."""

    code: Code
    place: Value

    @property
    def data(self) -> Value:
        """The address of its elements."""
        return self.code.load_field(self.place, BUFFER_DATA, PTR)

    def dim(self, axis: int) -> Value:
        """Its size along an axis."""
        dims = self.code.load_field(self.place, BUFFER_DIMS, PTR)
        return self.code.load(self.code.at(dims, axis, I64), I64)


class Job(NamedTuple):
    """The work of one call.

    Attributes:
        num_chunks: Number of chunks, each done by one thread. An empty call has one empty chunk.
        values: Pointers, then i64, for the chunk function, which reads them with `read_values`.
    """

    num_chunks: Number
    values: Sequence[Value]


def read_values(code: Code, values: Value, num_pointers: int, num_integers: int) -> list[Value]:
    """Reads all values of a job in order, in the code of its chunk function.

    Args:
        code: Code of the chunk function.
        values: The function's first argument.
        num_pointers: Number of pointers among the values; these come first.
        num_integers: Number of i64 after them.
    """
    types = [PTR] * num_pointers + [I64] * num_integers
    return [code.load_field(values, 8 * place, type_) for place, type_ in enumerate(types)]


class Operation(NamedTuple):
    """A JIT-compiled CPU kernel.

    Attributes:
        name: Name of the kernel in traces.
        num_arguments: Number of input arrays.
        num_results: Number of output arrays.
        write_chunk: Writes the function f(values, chunk) into a module.
        plan: Writes the code that splits a call into chunks, from its arrays and the number of
            threads.
    """

    name: str
    num_arguments: int
    num_results: int
    write_chunk: Callable[[Module, Vectors], Value]
    plan: Callable[[Code, Sequence[Buffer], Value], Job]


@functools.cache
def unavailable() -> str | None:
    """Why this process has no JIT-compiled CPU kernels; None if it has them."""
    reason = machine.missing()
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


def register(operation: Operation) -> str:
    """Registers a kernel with XLA for CPUs, and returns the name to call it by. Any thread.

    The name identifies the code, since compiled programs on disk call the kernel by name.
    """
    api = load_api()
    assert not isinstance(api, str), api
    text = module_of(operation, api, host_vectors())
    with _REGISTERING:  # XLA refuses a name that it has already
        return _register(text, api, operation.name)


_REGISTERING = threading.Lock()


@functools.cache
def module_of(operation: Operation, api: Api, vectors: Vectors) -> str:
    """The LLVM IR of a kernel."""
    module = Module()
    chunk = operation.write_chunk(module, vectors)
    _write_handler(module, operation, api, chunk)
    return module.text


@functools.cache
def _register(text: str, api: Api, name: str) -> str:
    import llvmlite.binding as llvm

    for symbol, address in compile_threads(api, host_vectors()).items():
        llvm.add_symbol(symbol, address)
    address = compile_module(text, host_vectors(), (_HANDLER,))[_HANDLER]
    handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)
    target = f"sgljax.{name}.{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="cpu")
    return target


_HANDLER = "handler"


def _write_handler(module: Module, operation: Operation, api: Api, chunk: Value) -> None:
    """Writes the function that XLA calls with a call frame; it returns no error."""
    run, new, num_threads = declare_threads(module)
    with Code(module, _HANDLER, PTR, [PTR], is_public=True) as code:
        (frame,) = code.arguments
        _answer_metadata(code, frame, api)
        functions = code.load_field(frame, FRAME_API, PTR)
        context = code.load_field(frame, FRAME_CONTEXT, PTR)
        buffers = [
            Buffer(code, code.load(code.at(code.load_field(frame, offset, PTR), i, PTR), PTR))
            for offset, count in (
                (FRAME_ARGUMENTS, operation.num_arguments),
                (FRAME_RESULTS, operation.num_results),
            )
            for i in range(count)
        ]
        threads = code.call(num_threads, I64, [functions, context])
        num_chunks, values = operation.plan(code, buffers, threads)
        size, count = Value(I64, str(8 * len(values))), code.max(num_chunks, 1)
        job = code.call(new, PTR, [size, count])
        code.store_field(chunk, job, FUNCTION)
        for place, value in enumerate(values):
            code.store_field(value, job, VALUES + 8 * place)
        code.call(run, VOID, [functions, context, job, threads])
        code.give()


def _answer_metadata(code: Code, frame: Value, api: Api) -> None:
    """Answers XLA's one query for the interface version of a handler."""
    extension = code.load_field(frame, FRAME_EXTENSION, PTR)
    with code.when(code.compare("ne", extension, NULL)):
        kind = code.load_field(extension, EXTENSION_KIND, I32)
        with code.when(code.compare("eq", kind, i32(METADATA_KIND))):
            metadata = code.load_field(extension, EXTENSION_METADATA, PTR)
            code.store_field(i32(api.major), metadata, METADATA_MAJOR)
            code.store_field(i32(api.minor), metadata, METADATA_MINOR)
            code.store_field(i32(0), metadata, METADATA_TRAITS)
            code.give()
