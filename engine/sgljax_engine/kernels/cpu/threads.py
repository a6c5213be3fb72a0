"""Shares the chunks of a kernel among XLA's threads, in JIT-compiled code.

Threads claim chunks one by one. The calling thread claims chunks too and never waits for a thread
that has not started: if none comes, it does all chunks itself. A thread that finds no more chunks
stays awake for some tens of microseconds, in a *slot* where the next kernel finds it. Waking
another thread would take as long as a small product. Kernels of several programs may run at the
same time.

A *job* is the state that a kernel's threads share; the last of them frees it:

    0 next chunk    8 chunks done    16 number of users    24 number of chunks    32 function
    40 the function's own values

No thread of XLA's is asked to join while requests for as many threads as exist are pending: threads
busy elsewhere would later find a queue of finished jobs.
"""

from __future__ import annotations

from sgljax_engine.kernels.cpu.abi import COUNT, DESTROY, SCHEDULE, Api
from sgljax_engine.kernels.cpu.emit import I32, I64, NULL, PTR, VOID, Code, Module, Value
from sgljax_engine.kernels.cpu.machine import Vectors, compile_module

NEXT, DONE, USERS, NUM_CHUNKS, FUNCTION, VALUES = 0, 8, 16, 24, 32, 40

RUN = "sgljax_run_job"
NEW = "sgljax_new_job"
NUM_THREADS = "sgljax_num_threads"

_NUM_SLOTS = 64
_SLOT_BYTES = 64
_FREE, _AWAKE = 0, 1
"""States of a slot; any other value is the address of the job that its thread should join."""

_SPINS = 1500
"""Polls of a slot before a thread gives up, each some tens of nanoseconds."""

_PATIENCE = 2000
"""Polls for the last chunks before the caller starts to yield its core each time."""


def compile_threads(api: Api, vectors: Vectors) -> dict[str, int]:
    """Compiles RUN, NEW and NUM_THREADS, once per process: all kernels share the slots."""
    return compile_module(threads_module(api).text, vectors, (RUN, NEW, NUM_THREADS))


def declare_threads(module: Module) -> tuple[Value, Value, Value]:
    """Declares RUN, NEW and NUM_THREADS for the functions of another module.

    RUN(api, context, job, threads) runs a job, whose function is called as f(values, chunk).
    NEW(bytes, chunks) makes a job with that many bytes of values. NUM_THREADS(api, context) is the
    number of XLA's threads.
    """
    return (
        module.declare(RUN, VOID, [PTR, PTR, PTR, I64]),
        module.declare(NEW, PTR, [I64, I64]),
        module.declare(NUM_THREADS, I64, [PTR, PTR]),
    )


def threads_module(api: Api) -> Module:
    """The code of this module."""
    module = Module()
    slots = module.memory("slots", f"[{_NUM_SLOTS * _SLOT_BYTES // 8} x i64]")
    num_asked = module.memory("asked", "[8 x i64]")
    work, release = _write_work(module), _write_release(module)
    join = _write_join(module, slots, num_asked, work, release)
    discard = _write_discard(module, api)
    ask = _write_ask(module, api, num_asked, join, release, discard)
    _write_run(module, slots, ask, work, release)
    _write_new(module)
    _write_num_threads(module, api, discard)
    return module


def _slot(code: Code, slots: Value, index: Value) -> Value:
    return code.at(slots, code.mul(index, _SLOT_BYTES), "i8")


def _write_work(module: Module) -> Value:
    """Writes the function that does chunks of a job until all are claimed."""
    with Code(module, "work", VOID, [PTR]) as code:
        (job,) = code.arguments
        count = code.load_field(job, NUM_CHUNKS, I64)
        function = code.load_field(job, FUNCTION, PTR)
        values = code.at(job, VALUES, "i8")
        chunk = code.variable(code.atomic("add", job, 1))
        with code.repeat(lambda: code.less(chunk.get(), count)):
            code.call(function, VOID, [values, chunk.get()])
            code.atomic("add", code.at(job, DONE, "i8"), 1)
            chunk.set(code.atomic("add", job, 1))
    return code.function


def _write_release(module: Module) -> Value:
    free = module.declare("free", VOID, [PTR])
    with Code(module, "release", VOID, [PTR]) as code:
        (job,) = code.arguments
        users = code.atomic("sub", code.at(job, USERS, "i8"), 1)
        with code.when(code.equal(users, 1)):
            code.call(free, VOID, [job])
    return code.function


def _write_join(
    module: Module, slots: Value, num_asked: Value, work: Value, release: Value
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
            code.give()
        slot = _slot(code, slots, mine.get())
        left = code.variable(_SPINS)
        with code.repeat(lambda: code.equal(0, 0)):
            is_late = code.equal(left.get(), 0)
            # A caller may have put a job into the slot just now.
            with code.when(is_late), code.when(code.exchange_if(slot, _AWAKE, _FREE)):
                code.give()
            found = code.atomic_load(slot)
            is_idle = code.equal(found, _AWAKE)
            with code.when(is_idle):
                code.intrinsic("llvm.x86.sse2.pause", VOID, [])
                left.set(code.max(code.sub(left.get(), 1), 0))
            with code.unless(is_idle):
                code.atomic("xchg", slot, _AWAKE)
                do(code.convert("inttoptr", found, PTR))
                left.set(Value(I64, str(_SPINS)))
    return code.function


def _write_discard(module: Module, api: Api) -> Value:
    """Writes the function that frees an XLA error: without threads the caller does everything."""
    with Code(module, "discard", VOID, [PTR, PTR]) as code:
        functions, error = code.arguments
        asked = code.stack(f"[{len(DESTROY)} x i64]")
        _fill(code, asked, [error])
        code.call(code.load_field(functions, api.destroy_error, PTR), VOID, [asked])
    return code.function


def _write_ask(
    module: Module, api: Api, num_asked: Value, join: Value, release: Value, discard: Value
) -> Value:
    """Writes f(api, context, job, threads): asks a thread of XLA's to join, if it may come soon."""
    with Code(module, "ask", VOID, [PTR, PTR, PTR, I64]) as code:
        functions, context, job, threads = code.arguments
        with code.unless(code.less(code.atomic("add", num_asked, 1), threads)):
            code.atomic("sub", num_asked, 1)
            code.call(release, VOID, [job])
            code.give()
        asked = code.stack(f"[{len(SCHEDULE)} x i64]")
        _fill(code, asked, [context, join, job])
        error = code.call(code.load_field(functions, api.schedule, PTR), PTR, [asked])
        with code.when(code.compare("ne", error, NULL)):
            code.atomic("sub", num_asked, 1)
            code.call(discard, VOID, [functions, error])
            code.call(release, VOID, [job])
    return code.function


def _write_run(module: Module, slots: Value, ask: Value, work: Value, release: Value) -> None:
    yield_core = module.declare("sched_yield", I32, [])
    with Code(module, RUN, VOID, [PTR, PTR, PTR, I64], is_public=True) as code:
        functions, context, job, threads = code.arguments
        chunks = code.load_field(job, NUM_CHUNKS, I64)
        helpers = code.variable(code.sub(code.min(threads, chunks), 1))
        code.store_field(code.add(helpers.get(), 1), job, USERS)
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
            code.call(ask, VOID, [functions, context, job, threads])
            helpers.set(code.sub(helpers.get(), 1))
        code.call(work, VOID, [job])
        done, patience = code.at(job, DONE, "i8"), code.variable(_PATIENCE)
        with code.repeat(lambda: code.less(code.atomic_load(done), chunks)):
            code.intrinsic("llvm.x86.sse2.pause", VOID, [])
            patience.set(code.max(code.sub(patience.get(), 1), 0))
            with code.when(code.equal(patience.get(), 0)):
                code.call(yield_core, I32, [])
        code.call(release, VOID, [job])


def _write_new(module: Module) -> None:
    malloc = module.declare("malloc", PTR, [I64])
    with Code(module, NEW, PTR, [I64, I64], is_public=True) as code:
        num_bytes, chunks = code.arguments
        job = code.call(malloc, PTR, [code.add(num_bytes, VALUES)])
        for offset, value in ((NEXT, 0), (DONE, 0), (NUM_CHUNKS, chunks)):
            code.store_field(value, job, offset)
        code.give(job)


def _write_num_threads(module: Module, api: Api, discard: Value) -> None:
    with Code(module, NUM_THREADS, I64, [PTR, PTR], is_public=True) as code:
        functions, context = code.arguments
        count, asked = code.stack(I64), code.stack(f"[{len(COUNT)} x i64]")
        code.store(Value(I64, "1"), count)
        _fill(code, asked, [context, count])
        error = code.call(code.load_field(functions, api.num_threads, PTR), PTR, [asked])
        with code.when(code.compare("ne", error, NULL)):
            code.call(discard, VOID, [functions, error])
        code.give(code.max(code.load(count, I64), 1))


def _fill(code: Code, structure: Value, members: list[Value]) -> None:
    """Fills a structure of XLA's: its size, no extensions, and its own members."""
    for place, value in enumerate([8 * (len(members) + 2), 0, *members]):
        code.store_field(value, structure, 8 * place)
