"""Operations of machine code as foreign functions of XLA, which programs call by name."""

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
    """An array that an operation gets or fills, in the code of its handler."""

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
    """What a handler wants done.

    Attributes:
        num_chunks: Chunks, each done by one thread. An empty call has one, with nothing to do.
        values: Pointers and then i64 for the chunk function, which reads them by `read_values`.
    """

    num_chunks: Number
    values: Sequence[Value]


def read_values(code: Code, values: Value, num_pointers: int, num_integers: int) -> list[Value]:
    """All values of a job in their order, in the code of its chunk function.

    Args:
        code: Of that function.
        values: Its first argument.
        num_pointers: How many of the values are pointers; these come first.
        num_integers: How many i64 come behind them.
    """
    types = [PTR] * num_pointers + [I64] * num_integers
    return [code.load_field(values, 8 * place, type_) for place, type_ in enumerate(types)]


class Operation(NamedTuple):
    """An operation of machine code.

    Attributes:
        name: Its own, by which code is told from other code in traces.
        num_arguments: Arrays that it gets.
        num_results: Arrays that it fills.
        write_chunk: Writes the function f(values, chunk) into a module.
        plan: Writes how a call is cut into chunks: from its arrays, and the number of threads.
    """

    name: str
    num_arguments: int
    num_results: int
    write_chunk: Callable[[Module, Vectors], Value]
    plan: Callable[[Code, Sequence[Buffer], Value], Job]


@functools.cache
def unavailable() -> str | None:
    """Why there are no operations of machine code in this process; None if there are."""
    reason = machine.missing()
    if reason is not None:
        return reason
    api = load_api()
    if isinstance(api, str):
        return api
    try:
        compile_threads(api, host_vectors())
    except Exception as error:  # llvmlite's, of a version that nobody has tried
        return f"llvmlite makes no code here: {error}"
    return None


def register(operation: Operation) -> str:
    """Makes an operation known to XLA, for CPUs, and returns the name to call it by. Any thread.

    The name says what the code is, since compiled programs that are kept on disk call it by that.
    """
    api = load_api()
    assert not isinstance(api, str), api
    text = module_of(operation, api, host_vectors())
    with _REGISTERING:  # XLA refuses a name that it knows
        return _register(text, api, operation.name)


_REGISTERING = threading.Lock()


@functools.cache
def module_of(operation: Operation, api: Api, vectors: Vectors) -> str:
    """The code of an operation."""
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
    """What XLA calls, with a call frame; it returns no error."""
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
    """XLA asks once which version of its interface a handler was written for."""
    extension = code.load_field(frame, FRAME_EXTENSION, PTR)
    with code.when(code.compare("ne", extension, NULL)):
        kind = code.load_field(extension, EXTENSION_KIND, I32)
        with code.when(code.compare("eq", kind, i32(METADATA_KIND))):
            metadata = code.load_field(extension, EXTENSION_METADATA, PTR)
            code.store_field(i32(api.major), metadata, METADATA_MAJOR)
            code.store_field(i32(api.minor), metadata, METADATA_MINOR)
            code.store_field(i32(0), metadata, METADATA_TRAITS)
            code.give()
