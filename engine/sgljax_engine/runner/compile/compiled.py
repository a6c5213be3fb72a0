"""The compiled device programs: one per bucket, ahead of time, counted. Engine thread only.

The engine thread traces and lowers one program after another in Python, while other threads compile
the lowered ones, which XLA does without Python's lock.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from sgljax_engine.errors import CompileForbiddenError
from sgljax_engine.layers.devices import Options, compiler_options
from sgljax_engine.observability.progress import ProgressListener, reporting
from sgljax_engine.placement.shardings import Placement
from sgljax_engine.runner.compile.program_fit import checked_fit
from sgljax_engine.runner.programs import decode, pages, prefill, score
from sgljax_engine.runner.programs.context import ProgramContext

logger = logging.getLogger(__name__)

_MAX_COMPILE_THREADS = 8
"""XLA uses several threads for one program already, and each compilation takes memory."""

_MAX_FUNCTIONS = 64
"""Each function keeps its programs of all shapes; an engine has up to eight functions."""


class ProgramCall(NamedTuple):
    """A program's name, and its arguments after the state that it takes."""

    name: str
    args: tuple[Any, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """Key of the compiled program. All calls with the same name have the same dtypes."""
        leaves, structure = jax.tree.flatten(self.args)
        return (self.name, structure, *map(np.shape, leaves))


class ProgramState(NamedTuple):
    """State that programs use beside their arguments.

    Attributes:
        weights, kv: The runner's arrays.
        moved: Contents of some pages that move out of `kv` or into it.
    """

    weights: Any
    kv: Any
    moved: Any = ()


class _Program(NamedTuple):
    """A device program: the state that it takes before its arguments, and the state it returns.

    State that it takes and returns is donated.
    """

    function: Callable[..., Any]
    takes: tuple[str, ...]
    gives: tuple[str, ...]


_PROGRAMS = {
    "prefill": _Program(prefill.prefill, ("weights", "kv"), ("kv",)),
    "copy_pages": _Program(pages.copy_pages, ("kv",), ("kv",)),
    "decode": _Program(decode.decode, ("weights", "kv"), ("kv", "result")),
    "read_pages": _Program(pages.read_pages, ("kv",), ("moved",)),
    "write_pages": _Program(pages.write_pages, ("kv", "moved"), ("kv",)),
    "copy_states": _Program(pages.copy_states, ("kv",), ("kv",)),
    "read_states": _Program(pages.read_states, ("kv",), ("result",)),
    "write_states": _Program(pages.write_states, ("kv",), ("kv",)),
    "read_routed": _Program(pages.read_routed, ("kv",), ("result",)),
    "score": _Program(score.score, ("weights",), ("result",)),
}


def takes_kv(name: str) -> bool:
    return "kv" in _PROGRAMS[name].takes


class ProgramCache:
    """Programs by name and argument shapes.

    `num_compiles` counts programs prepared so far; `_jitted` may find one compiled already.
    `compile_s` is what the engine thread spent on them. Once `is_sealed`, a missing program is
    refused. `progress` is told of each program that its first use compiles.
    """

    def __init__(
        self,
        static: ProgramContext,
        placement: Placement,
        lowerings: Lowerings | None = None,
    ) -> None:
        self._static = static
        self._placement = placement
        self._lowerings = lowerings
        self._programs: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self.num_compiles = 0
        self.compile_s = 0.0
        self.is_sealed = False
        self.progress: ProgressListener | None = None

    def run_program(self, call: ProgramCall, state: ProgramState) -> tuple[ProgramState, Any]:
        """Runs a program, compiled first if it is new. Donates the parts of the cache it writes.

        Returns the state with the parts that the program updated, and its result, or None. Raises
        CompileForbiddenError when it is new and the cache is sealed.
        """
        key = call.key
        if key not in self._programs:
            if self.is_sealed:
                raise CompileForbiddenError(
                    f"forbid_compile is set and {call.name} needs a new program for shapes "
                    f"{list(key[2:])}; warmup did not cover it"
                )
            with reporting(self.progress, f"compile {call.name}", 1, "program") as advance:
                self.compile([call], state, lambda: advance(1))
        program = _PROGRAMS[call.name]
        taken = [getattr(state, part) for part in program.takes]
        out = self._programs[key](*taken, *call.args)
        made = dict(zip(program.gives, out if len(program.gives) > 1 else (out,), strict=True))
        result = made.pop("result", None)
        return state._replace(**made), result

    def count_new(self, calls: Sequence[ProgramCall]) -> int:
        """Number of programs that the calls need and that are not compiled yet."""
        return len({call.key for call in calls} - set(self._programs))

    def compile(
        self,
        calls: Sequence[ProgramCall],
        state: ProgramState,
        on_compiled: Callable[[], None] = lambda: None,
    ) -> None:
        """Compiles the missing programs of the calls, several at a time.

        `on_compiled` is called on the thread that compiled it. An error names its program.
        """
        options = compiler_options(self._placement.is_own_cpu)
        new = {key: call for call in calls if (key := call.key) not in self._programs}
        started = time.perf_counter()
        num_threads = min(max(len(new), 1), os.cpu_count() or 1, _MAX_COMPILE_THREADS)
        pool = ThreadPoolExecutor(num_threads, "sgljax-compile")
        made: dict[tuple[Any, ...], Future[Callable[..., Any]]] = {}
        try:
            for key, call in new.items():
                with _named(key):
                    if self._lowerings is None:
                        lowered, devices = self.lower(call, state), None
                    else:
                        lowered = self._lowerings.get(key, lambda c=call: self.lower(c, state))
                        devices = tuple(self._placement.mesh.devices.flat)
                made[key] = pool.submit(_compile, key, lowered, devices, options, on_compiled)
            for key, future in made.items():
                self._programs[key] = future.result()
                self.num_compiles += 1
        finally:
            pool.shutdown(cancel_futures=True)
            self.compile_s += time.perf_counter() - started

    def compile_alone(self, call: ProgramCall, state: ProgramState) -> jax.stages.Compiled:
        """A call's program, compiled for the devices of a single engine and not kept.

        The devices need not exist. Raises ProgramDoesNotFit when the compiler finds no room there.
        """
        assert self._lowerings is None
        options = compiler_options(self._placement.is_own_cpu)
        # Pallas asks the mesh which kind of device it writes for; JAX's own are of another kind.
        with jax.sharding.use_abstract_mesh(self._placement.mesh.abstract_mesh):
            lowered = self.lower(call, state)
        with checked_fit():
            return _compile(call.key, lowered, None, options, lambda: None)

    def clear(self) -> None:
        self._programs.clear()

    def lower(self, call: ProgramCall, state: ProgramState) -> jax.stages.Lowered:
        """A call's program before compilation; the state may be shapes with shardings."""
        program = _PROGRAMS[call.name]
        everywhere = self._placement.replicated
        placed = {
            "weights": jax.tree.map(lambda x: x.sharding, state.weights),
            "kv": jax.tree.map(lambda x: x.sharding, state.kv),
            "moved": jax.tree.map(lambda x: x.sharding, state.kv._replace(states=())),
            "result": everywhere,
        }
        outputs = [placed[part] for part in program.gives]
        inputs = (
            *(placed[part] for part in program.takes),
            *jax.tree.map(lambda _: everywhere, call.args),
        )
        both = inputs, tuple(outputs) if len(outputs) > 1 else outputs[0]
        leaves, structure = jax.tree.flatten(both)
        args = (*(getattr(state, part) for part in program.takes), *call.args)
        if self._lowerings is None:
            jitted = _jitted(call.name, self._static, tuple(leaves), structure)
            return jitted.lower(*args)
        # Without devices, so that it can be compiled for those of any engine of the group.
        jitted = _jitted(call.name, self._static, tuple(map(_abstract, leaves)), structure)
        traced = jitted.trace(*jax.tree.map(_shape, args))
        return traced.lower(lowering_platforms=(self._placement.platform,))


class Lowerings:
    """Programs of a group of engines, traced and lowered once for all of them. Any thread.

    XLA still compiles each program for each engine's devices: JAX has no executable that runs on
    other devices than those it was compiled for.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lowered: dict[tuple[Any, ...], jax.stages.Lowered] = {}

    @classmethod
    def for_engines(cls, count: int) -> Lowerings | None:
        """One for a group of engines; None for a single engine, or if JAX is too old for it."""
        parameters = inspect.signature(jax.stages.Lowered.compile).parameters
        return cls() if count > 1 and "device_assignment" in parameters else None

    def get(
        self, key: tuple[Any, ...], lower: Callable[[], jax.stages.Lowered]
    ) -> jax.stages.Lowered:
        """The lowered program of a key; lowers it if it is new, while other engines wait."""
        with self._lock:
            if key not in self._lowered:
                self._lowered[key] = lower()
            return self._lowered[key]


def _abstract(sharding: jax.sharding.Sharding) -> jax.sharding.NamedSharding:
    assert isinstance(sharding, jax.sharding.NamedSharding)
    kind = sharding.memory_kind
    return jax.sharding.NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=kind)


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@functools.lru_cache(maxsize=_MAX_FUNCTIONS)
def _jitted(
    name: str,
    static: ProgramContext,
    shardings: tuple[jax.sharding.Sharding, ...],
    structure: Any,
) -> Any:
    """A program before compilation: the same object for the same arguments.

    So JAX finds what it traced, lowered and compiled for another engine of this process.
    """
    function, takes, gives = _PROGRAMS[name]
    in_shardings, out_shardings = jax.tree.unflatten(structure, shardings)
    return jax.jit(
        functools.partial(function, static=static),
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        donate_argnums=tuple(i for i, part in enumerate(takes) if part in gives),
    )


def _compile(
    key: tuple[Any, ...],
    lowered: jax.stages.Lowered,
    devices: tuple[Any, ...] | None,
    options: Options | None,
    on_compiled: Callable[[], None],
) -> jax.stages.Compiled:
    started = time.perf_counter()
    with _named(key):
        if devices is None:
            compiled = lowered.compile(compiler_options=options)
        else:
            compiled = lowered.compile(compiler_options=options, device_assignment=devices)
    name, _, *shapes = key
    logger.info("compiled %s for %s in %.2f s", name, shapes, time.perf_counter() - started)
    on_compiled()
    return compiled


@contextlib.contextmanager
def _named(key: tuple[Any, ...]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        name, _, *shapes = key
        error.add_note(f"while compiling {name} for shapes {shapes}")
        raise
