"""Runs a chain of operations on XLA's threads, in JIT-compiled code.

A *chain* is a list of *phases*, each a few operations that do not depend on one another. Threads
claim the chunks of a phase one by one, and start the next phase when all chunks of this one are
done. The calling thread claims chunks too and never waits for a thread that has not started: if
none comes, it does all chunks itself. So a whole layer costs one wake-up, and each of its phases a
fraction of a microsecond.

A thread that finds no more phases stays awake for some tens of microseconds, in a *slot* where the
next chain finds it. Chains of several programs may run at the same time.

The handler of a chain reads what to do from a table of i64, an attribute of the call (`table`). It
copies it into a *job*, the state that the threads share; the last of them frees it:

    0 number of users    8 number of phases    64 phases, then operations, then values

    phase: 0 next chunk    64 chunks done    128 number of chunks    136 its first operation
    operation: 0 function    8 values    16 its first chunk    24 its last chunk + 1

No thread of XLA's is asked to join while requests for as many threads as exist are pending: threads
busy elsewhere would later find a queue of finished jobs.
"""

from __future__ import annotations

from sgljax_cpu.abi import (
    ARRAY_DATA,
    BUFFER_DATA,
    COUNT,
    DESTROY,
    EXTENSION_KIND,
    EXTENSION_METADATA,
    FRAME_API,
    FRAME_ARGUMENTS,
    FRAME_ATTRIBUTES,
    FRAME_CONTEXT,
    FRAME_EXTENSION,
    FRAME_NUM_ARGUMENTS,
    FRAME_RESULTS,
    METADATA_KIND,
    METADATA_MAJOR,
    METADATA_MINOR,
    METADATA_TRAITS,
    SCHEDULE,
    Api,
)
from sgljax_cpu.emit import I32, I64, NULL, PTR, VOID, Code, Module, Value, i32
from sgljax_cpu.machine import Vectors, compile_module

RUN = "sgljax_run_chain"

_USERS, _NUM_PHASES, _PHASES = 0, 8, 64
_DONE, _NUM_CHUNKS, _FIRST_OPERATION, _PHASE_BYTES = 64, 128, 136, 192
_FUNCTION, _VALUES, _FIRST_CHUNK, _END_CHUNK, _OPERATION_BYTES = 0, 8, 16, 24, 32

_NUM_SLOTS = 64
_SLOT_BYTES = 64
_FREE, _AWAKE = 0, 1
"""States of a slot; any other value is the address of the job that its thread should join."""

_SPINS = 1500
"""Polls of a slot before a thread gives up, each some tens of nanoseconds."""

_PATIENCE = 2000
"""Polls for the last chunks of a phase before a thread starts to yield its core each time."""


def compile_threads(api: Api, vectors: Vectors) -> dict[str, int]:
    """Compiles RUN, once per process: all chains share the slots."""
    return compile_module(threads_module(api, vectors).text, vectors, (RUN,))


def declare_run(module: Module) -> Value:
    """Declares RUN for the functions of another module.

    RUN(frame, functions) does what a call frame of XLA's asks for. `functions` is the address of a
    list of kernels, called as f(values, chunk).
    """
    return module.declare(RUN, VOID, [PTR, PTR])


def threads_module(api: Api, vectors: Vectors) -> Module:
    """The code of this module."""
    module = Module()
    slots = module.memory("slots", f"[{_NUM_SLOTS * _SLOT_BYTES // 8} x i64]")
    num_asked = module.memory("asked", "[8 x i64]")
    work, release = _write_work(module, vectors), _write_release(module)
    join = _write_join(module, vectors, slots, num_asked, work, release)
    discard = _write_discard(module, api)
    ask = _write_ask(module, api, num_asked, join, release, discard)
    threads = _write_num_threads(module, api, discard)
    share = _write_share(module, slots, ask, work, release)
    make = _write_make(module)
    with Code(module, RUN, VOID, [PTR, PTR], is_public=True) as code:
        frame, functions = code.arguments
        _answer_metadata(code, frame, api)
        job = code.call(make, PTR, [frame, functions])
        xla, context = (code.load_field(frame, at, PTR) for at in (FRAME_API, FRAME_CONTEXT))
        count = code.call(threads, I64, [xla, context])
        most = code.load(code.at(_table_of(code, frame), 3, I64), I64)
        code.call(share, VOID, [xla, context, job, code.min(count, most), count])
    return module


def _table_of(code: Code, frame: Value) -> Value:
    attribute = code.load(code.load_field(frame, FRAME_ATTRIBUTES, PTR), PTR)
    return code.load_field(attribute, ARRAY_DATA, PTR)


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
            code.ret()


def _write_make(module: Module) -> Value:
    """Writes f(frame, functions): makes the job of a call from its table."""
    malloc = module.declare("malloc", PTR, [I64])
    with Code(module, "make", PTR, [PTR, PTR]) as code:
        frame, functions = code.arguments
        table = _table_of(code, frame)
        num_phases, num_operations, num_values = (
            code.load(code.at(table, i, I64), I64) for i in range(3)
        )
        operations_at = code.add(_PHASES, code.mul(num_phases, _PHASE_BYTES))
        values_at = code.add(operations_at, code.mul(num_operations, _OPERATION_BYTES))
        size = code.add(values_at, code.mul(num_values, 8))
        job = code.call(malloc, PTR, [size])
        code.store_field(num_phases, job, _NUM_PHASES)
        num_arguments = code.load_field(frame, FRAME_NUM_ARGUMENTS, I64)
        lists = [code.load_field(frame, at, PTR) for at in (FRAME_ARGUMENTS, FRAME_RESULTS)]

        entry = code.variable(code.at(table, 4, I64))

        def take() -> Value:
            value = code.load(entry.get(), I64)
            entry.set(code.at(entry.get(), 1, I64))
            return value

        operation = code.variable(code.at(job, operations_at, "i8"))
        place = code.variable(code.at(job, values_at, "i8"))
        with code.loop(0, num_phases) as index:
            phase = _phase(code, job, index)
            count, chunks = take(), take()
            code.store_field(0, phase, 0)
            code.store_field(0, phase, _DONE)
            code.store_field(chunks, phase, _NUM_CHUNKS)
            code.store_field(operation.get(), phase, _FIRST_OPERATION)
            first = code.variable(0)
            with code.loop(0, count):
                kernel, chunks, values = take(), take(), take()
                function = code.load(code.at(functions, kernel, PTR), PTR)
                code.store_field(function, operation.get(), _FUNCTION)
                code.store_field(place.get(), operation.get(), _VALUES)
                code.store_field(first.get(), operation.get(), _FIRST_CHUNK)
                first.set(code.add(first.get(), chunks))
                code.store_field(first.get(), operation.get(), _END_CHUNK)
                operation.set(code.at(operation.get(), _OPERATION_BYTES, "i8"))
                with code.loop(0, values):
                    buffer, number = take(), take()
                    code.store(number, place.get())
                    with code.unless(code.less(buffer, 0)):
                        is_argument = code.less(buffer, num_arguments)
                        which = code.select(is_argument, *lists)
                        result = code.sub(buffer, num_arguments)
                        at = code.select(is_argument, buffer, result)
                        described = code.load(code.at(which, at, PTR), PTR)
                        data = code.load_field(described, BUFFER_DATA, PTR)
                        code.store(code.at(data, number, "i8"), place.get())
                    place.set(code.at(place.get(), 1, I64))
        code.ret(job)
    return code.function


def _phase(code: Code, job: Value, index: Value) -> Value:
    return code.at(job, code.add(_PHASES, code.mul(index, _PHASE_BYTES)), "i8")


def _slot(code: Code, slots: Value, index: Value) -> Value:
    return code.at(slots, code.mul(index, _SLOT_BYTES), "i8")


def _pause(code: Code, vectors: Vectors) -> None:
    """Leaves the core to others for some tens of cycles, in a loop that polls memory."""
    if vectors.is_arm:  # its own hint, YIELD, does nothing on most processors
        code.intrinsic("llvm.aarch64.isb", VOID, [i32(15)])
    else:
        code.intrinsic("llvm.x86.sse2.pause", VOID, [])


def _write_work(module: Module, vectors: Vectors) -> Value:
    """Writes the function that does chunks of a job, phase by phase, until all are done."""
    yield_core = module.declare("sched_yield", I32, [])
    with Code(module, "work", VOID, [PTR]) as code:
        (job,) = code.arguments
        with code.loop(0, code.load_field(job, _NUM_PHASES, I64)) as index:
            phase = _phase(code, job, index)
            count = code.load_field(phase, _NUM_CHUNKS, I64)
            done = code.at(phase, _DONE, "i8")
            first = code.load_field(phase, _FIRST_OPERATION, PTR)
            operation = code.variable(first)
            chunk = code.variable(code.atomic("add", phase, 1))
            with code.repeat(lambda: code.less(chunk.get(), count)):

                def is_later() -> Value:
                    end = code.load_field(operation.get(), _END_CHUNK, I64)
                    return code.compare("sge", chunk.get(), end)

                with code.repeat(is_later):
                    operation.set(code.at(operation.get(), _OPERATION_BYTES, "i8"))
                function = code.load_field(operation.get(), _FUNCTION, PTR)
                values = code.load_field(operation.get(), _VALUES, PTR)
                start = code.load_field(operation.get(), _FIRST_CHUNK, I64)
                code.call(function, VOID, [values, code.sub(chunk.get(), start)])
                code.atomic("add", done, 1)
                chunk.set(code.atomic("add", phase, 1))
            patience = code.variable(_PATIENCE)
            with code.repeat(lambda: code.less(code.atomic_load(done), count)):
                _pause(code, vectors)
                patience.set(code.max(code.sub(patience.get(), 1), 0))
                with code.when(code.equal(patience.get(), 0)):
                    code.call(yield_core, I32, [])
    return code.function


def _write_release(module: Module) -> Value:
    free = module.declare("free", VOID, [PTR])
    with Code(module, "release", VOID, [PTR]) as code:
        (job,) = code.arguments
        users = code.atomic("sub", code.at(job, _USERS, "i8"), 1)
        with code.when(code.equal(users, 1)):
            code.call(free, VOID, [job])
    return code.function


def _write_join(
    module: Module,
    vectors: Vectors,
    slots: Value,
    num_asked: Value,
    work: Value,
    release: Value,
) -> Value:
    """Writes what a thread of XLA's runs: a job, and others that come soon after it."""
    with Code(module, "join", VOID, [PTR]) as code:
        (first,) = code.arguments
        code.atomic("sub", num_asked, 1)

        def do(job: Value) -> None:
            code.call(work, VOID, [job])
            code.call(release, VOID, [job])

        do(first)
        mine, index = code.variable(_NUM_SLOTS), code.variable(0)
        with code.repeat(lambda: code.less(index.get(), _NUM_SLOTS)):
            index_now = index.get()
            taken = code.exchange_if(_slot(code, slots, index_now), _FREE, _AWAKE)
            mine.set(code.select(taken, index_now, mine.get()))
            index.set(code.select(taken, _NUM_SLOTS, code.add(index_now, 1)))
        with code.when(code.equal(mine.get(), _NUM_SLOTS)):
            code.ret()
        slot = _slot(code, slots, mine.get())
        left = code.variable(_SPINS)
        with code.repeat(lambda: code.equal(0, 0)):
            is_late = code.equal(left.get(), 0)
            # A caller may have put a job into the slot just now.
            with code.when(is_late), code.when(code.exchange_if(slot, _AWAKE, _FREE)):
                code.ret()
            found = code.atomic_load(slot)
            is_idle = code.equal(found, _AWAKE)
            with code.when(is_idle):
                _pause(code, vectors)
                left.set(code.max(code.sub(left.get(), 1), 0))
            with code.unless(is_idle):
                code.atomic("xchg", slot, _AWAKE)
                do(code.convert("inttoptr", found, PTR))
                left.set(Value(I64, str(_SPINS)))
    return code.function


def _write_discard(module: Module, api: Api) -> Value:
    """Writes the function that frees an XLA error: without threads the caller does everything."""
    with Code(module, "discard", VOID, [PTR, PTR]) as code:
        xla, error = code.arguments
        asked = code.stack(f"[{len(DESTROY)} x i64]")
        _fill(code, asked, [error])
        code.call(code.load_field(xla, api.destroy_error, PTR), VOID, [asked])
    return code.function


def _write_ask(
    module: Module, api: Api, num_asked: Value, join: Value, release: Value, discard: Value
) -> Value:
    """Writes f(xla, context, job, threads): asks a thread of XLA's to join, if it may come soon."""
    with Code(module, "ask", VOID, [PTR, PTR, PTR, I64]) as code:
        xla, context, job, threads = code.arguments
        with code.unless(code.less(code.atomic("add", num_asked, 1), threads)):
            code.atomic("sub", num_asked, 1)
            code.call(release, VOID, [job])
            code.ret()
        asked = code.stack(f"[{len(SCHEDULE)} x i64]")
        _fill(code, asked, [context, join, job])
        error = code.call(code.load_field(xla, api.schedule, PTR), PTR, [asked])
        with code.when(code.compare("ne", error, NULL)):
            code.atomic("sub", num_asked, 1)
            code.call(discard, VOID, [xla, error])
            code.call(release, VOID, [job])
    return code.function


def _write_share(module: Module, slots: Value, ask: Value, work: Value, release: Value) -> Value:
    """Writes f(xla, context, job, users, threads): does a job with `users - 1` other threads."""
    with Code(module, "share", VOID, [PTR, PTR, PTR, I64, I64]) as code:
        xla, context, job, users, threads = code.arguments
        helpers = code.variable(code.sub(users, 1))
        code.store_field(users, job, _USERS)
        code.fence()
        address, index = code.convert("ptrtoint", job, I64), code.variable(0)

        def is_looking() -> Value:
            return code.both(code.less(index.get(), _NUM_SLOTS), code.less(0, helpers.get()))

        with code.repeat(is_looking):
            slot = _slot(code, slots, index.get())
            is_awake = code.equal(code.atomic_load(slot), _AWAKE)
            with code.when(is_awake), code.when(code.exchange_if(slot, _AWAKE, address)):
                helpers.set(code.sub(helpers.get(), 1))
            index.set(code.add(index.get(), 1))
        with code.repeat(lambda: code.less(0, helpers.get())):
            code.call(ask, VOID, [xla, context, job, threads])
            helpers.set(code.sub(helpers.get(), 1))
        code.call(work, VOID, [job])
        code.call(release, VOID, [job])
    return code.function


def _write_num_threads(module: Module, api: Api, discard: Value) -> Value:
    """Writes f(xla, context): the number of XLA's threads."""
    with Code(module, "num_threads", I64, [PTR, PTR]) as code:
        xla, context = code.arguments
        count, asked = code.stack(I64), code.stack(f"[{len(COUNT)} x i64]")
        code.store(Value(I64, "1"), count)
        _fill(code, asked, [context, count])
        error = code.call(code.load_field(xla, api.num_threads, PTR), PTR, [asked])
        with code.when(code.compare("ne", error, NULL)):
            code.call(discard, VOID, [xla, error])
        code.ret(code.max(code.load(count, I64), 1))
    return code.function


def _fill(code: Code, structure: Value, members: list[Value]) -> None:
    """Fills a structure of XLA's: its size, no extensions, and its own members."""
    for place, value in enumerate([8 * (len(members) + 2), 0, *members]):
        code.store_field(value, structure, 8 * place)
