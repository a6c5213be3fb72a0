"""The compiled device programs: one a bucket, made ahead of time, counted. Engine thread only.

Ahead of time the engine thread traces and lowers one program after another, which is Python, while
other threads compile those that are lowered, which XLA does without Python's lock.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from sgljax_engine.errors import CompileForbiddenError
from sgljax_engine.runner import programs, scoring
from sgljax_engine.runner.placement import Placement
from sgljax_engine.xla_options import Options, compiler_options

logger = logging.getLogger(__name__)

_MAX_COMPILE_THREADS = 8
"""XLA uses several threads for one program already, and each program takes memory meanwhile."""

_MAX_FUNCTIONS = 64
"""Each keeps its programs, of all shapes; an engine has up to six."""


class ProgramCall(NamedTuple):
    """A program's name, and its arguments after the state that it takes."""

    name: str
    args: tuple[Any, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """What its compiled program is found by. Dtypes are the same in all calls of a name."""
        leaves, structure = jax.tree.flatten(self.args)
        return (self.name, structure, *(np.shape(leaf) for leaf in leaves))


class ProgramState(NamedTuple):
    """What programs work on beside their arguments.

    Attributes:
        weights, kv, contiguous_kv: As the runner has them.
        moved: Contents of some pages, on their way out of `kv` or into it.
    """

    weights: Any
    kv: Any
    contiguous_kv: Any
    moved: Any = ()


class _Program(NamedTuple):
    """A device program: the state that it takes before its arguments, and what it returns.

    State that it takes and returns is donated.
    """

    function: Callable[..., Any]
    takes: tuple[str, ...]
    gives: tuple[str, ...]


_PROGRAMS = {
    "prefill": _Program(programs.prefill, ("weights", "kv"), ("kv",)),
    "copy_pages": _Program(programs.copy_pages, ("kv",), ("kv",)),
    "decode": _Program(
        programs.decode, ("weights", "kv", "contiguous_kv"), ("kv", "contiguous_kv", "result")
    ),
    "read_pages": _Program(programs.read_pages, ("kv",), ("moved",)),
    "write_pages": _Program(programs.write_pages, ("kv", "moved"), ("kv",)),
    "score": _Program(scoring.score, ("weights",), ("result",)),
}


def takes_kv(name: str) -> bool:
    """Whether a program works on the KV pages."""
    return "kv" in _PROGRAMS[name].takes


class ProgramCache:
    """Programs by name and argument shapes.

    Attributes:
        num_compiles: Programs made ready so far; see `_jitted` for those that are found.
        compile_s: Seconds that the engine thread spent on that.
        is_sealed: A program that is not there is refused, not compiled.
    """

    def __init__(self, static: programs.ProgramContext, placement: Placement) -> None:
        """Starts empty.

        Args:
            static: What programs are compiled for.
            placement: Where their arguments live.
        """
        self._static = static
        self._placement = placement
        self._programs: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self.num_compiles = 0
        self.compile_s = 0.0
        self.is_sealed = False

    def run(self, call: ProgramCall, state: ProgramState) -> tuple[ProgramState, Any]:
        """Runs a program, compiled now if it is new. It donates the parts of the cache it writes.

        Returns:
            The state with the parts that the program made, and its result, None if it has none.

        Raises:
            CompileForbiddenError: when it is new and the cache is sealed.
        """
        key = call.key
        if key not in self._programs:
            if self.is_sealed:
                raise CompileForbiddenError(
                    f"forbid_compile is set and {call.name} needs a new program for shapes "
                    f"{list(key[2:])}; warmup did not cover it"
                )
            self.compile([call], state)
        program = _PROGRAMS[call.name]
        out = self._programs[key](*(getattr(state, part) for part in program.takes), *call.args)
        made = dict(zip(program.gives, out if len(program.gives) > 1 else (out,), strict=True))
        result = made.pop("result", None)
        return state._replace(**made), result

    def count_new(self, calls: Sequence[ProgramCall]) -> int:
        """How many programs of the calls are not there yet."""
        return len({call.key for call in calls} - set(self._programs))

    def compile(
        self,
        calls: Sequence[ProgramCall],
        state: ProgramState,
        on_compiled: Callable[[], None] = lambda: None,
    ) -> None:
        """Compiles the programs of the calls that are not there yet, several at a time.

        An error carries a note that names its program.

        Args:
            calls: One of each program.
            state: What they will work on.
            on_compiled: Called for each program, on the thread that compiled it.
        """
        options = compiler_options(self._placement.platform)
        new = {key: call for call in calls if (key := call.key) not in self._programs}
        started = time.perf_counter()
        num_threads = min(max(len(new), 1), os.cpu_count() or 1, _MAX_COMPILE_THREADS)
        pool = ThreadPoolExecutor(num_threads, "sgljax-compile")
        made: dict[tuple[Any, ...], Future[Callable[..., Any]]] = {}
        try:
            for key, call in new.items():
                with _named(key):
                    lowered = self._lower(call, state)
                made[key] = pool.submit(_compile, key, lowered, options, on_compiled)
            for key, future in made.items():
                self._programs[key] = future.result()
                self.num_compiles += 1
        finally:
            pool.shutdown(cancel_futures=True)
            self.compile_s += time.perf_counter() - started

    def clear(self) -> None:
        """Lets go of all programs; what engines share stays with the process."""
        self._programs.clear()

    def _lower(self, call: ProgramCall, state: ProgramState) -> jax.stages.Lowered:
        program = _PROGRAMS[call.name]
        everywhere = self._placement.replicated
        placed = {
            "weights": jax.tree.map(lambda x: x.sharding, state.weights),
            "kv": jax.tree.map(lambda x: x.sharding, state.kv),
            "contiguous_kv": jax.tree.map(lambda x: x.sharding, state.contiguous_kv),
            "moved": jax.tree.map(lambda x: x.sharding, state.kv),
            "result": everywhere,
        }
        outputs = [placed[part] for part in program.gives]
        inputs = (
            *(placed[part] for part in program.takes),
            *jax.tree.map(lambda _: everywhere, call.args),
        )
        both = inputs, tuple(outputs) if len(outputs) > 1 else outputs[0]
        leaves, structure = jax.tree.flatten(both)
        jitted = _jitted(call.name, self._static, tuple(leaves), structure)
        return jitted.lower(*(getattr(state, part) for part in program.takes), *call.args)


@functools.lru_cache(maxsize=_MAX_FUNCTIONS)
def _jitted(
    name: str,
    static: programs.ProgramContext,
    shardings: tuple[jax.sharding.Sharding, ...],
    structure: Any,
) -> Any:
    """A program before it is compiled: the same object for the same arguments.

    JAX then finds what it traced, lowered and compiled of it for another engine of this process.

    Args:
        name: Of `_PROGRAMS`.
        static: What it is compiled for.
        shardings: Those of its inputs and outputs, the leaves of a tree.
        structure: That tree's.
    """
    function, takes, gives = _PROGRAMS[name]
    if "weights" in takes:
        function = functools.partial(function, static=static)
    in_shardings, out_shardings = jax.tree.unflatten(structure, shardings)
    return jax.jit(
        function,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        donate_argnums=tuple(i for i, part in enumerate(takes) if part in gives),
    )


def _compile(
    key: tuple[Any, ...],
    lowered: jax.stages.Lowered,
    options: Options | None,
    on_compiled: Callable[[], None],
) -> Callable[..., Any]:
    """Any thread: all that a program is compiled for was settled when it was lowered."""
    started = time.perf_counter()
    with _named(key):
        compiled = lowered.compile(compiler_options=options)
    name, _, *shapes = key
    logger.info("compiled %s for %s in %.2f s", name, shapes, time.perf_counter() - started)
    on_compiled()
    return compiled


@contextlib.contextmanager
def _named(key: tuple[Any, ...]) -> Iterator[None]:
    """Adds to an error which program could not be compiled."""
    try:
        yield
    except Exception as error:
        name, _, *shapes = key
        error.add_note(f"while compiling {name} for shapes {shapes}")
        raise
