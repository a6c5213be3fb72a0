"""The compiled device programs: one a bucket, made ahead of time, counted. Engine thread only."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from sgljax_engine.errors import CompileForbiddenError
from sgljax_engine.runner import programs, scoring
from sgljax_engine.runner.placement import Placement

logger = logging.getLogger(__name__)


class _Program(NamedTuple):
    """A device program: the state that it takes before its arguments, and what it returns."""

    function: Callable[..., Any]
    takes: tuple[str, ...]
    gives: tuple[str, ...]


_PROGRAMS = {
    "prefill": _Program(programs.prefill, ("weights", "kv"), ("kv",)),
    "copy_pages": _Program(programs.copy_pages, ("kv",), ("kv",)),
    "decode": _Program(programs.decode, ("weights", "kv"), ("kv", "result")),
    "score": _Program(scoring.score, ("weights",), ("result",)),
}


class ProgramCache:
    """Programs by name and argument shapes.

    Attributes:
        num_compiles: Programs compiled so far.
        compile_s: Seconds spent on that.
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

    def call(self, name: str, args: tuple[Any, ...], *, weights: Any, kv: Any) -> Any:
        """Runs a program, compiled now if it is new. It donates `kv` if it writes pages.

        Raises:
            CompileForbiddenError: when it is new and the cache is sealed.
        """
        state = {"weights": weights, "kv": kv}
        leaves, structure = jax.tree.flatten(args)
        key = (name, structure, *(np.shape(leaf) for leaf in leaves))
        if key not in self._programs:
            shapes = list(key[2:])
            if self.is_sealed:
                raise CompileForbiddenError(
                    f"forbid_compile is set and {name} needs a new program for shapes {shapes}; "
                    "warmup did not cover it"
                )
            started = time.perf_counter()
            self._programs[key] = self._compile(name, args, state)
            seconds = time.perf_counter() - started
            self.num_compiles += 1
            self.compile_s += seconds
            logger.info("compiled %s for %s in %.2f s", name, shapes, seconds)
        return self._programs[key](*(state[part] for part in _PROGRAMS[name].takes), *args)

    def clear(self) -> None:
        """Lets go of all programs."""
        self._programs.clear()

    def _compile(
        self, name: str, args: tuple[Any, ...], state: dict[str, Any]
    ) -> Callable[..., Any]:
        function, takes, gives = _PROGRAMS[name]
        if "weights" in takes:
            function = functools.partial(function, static=self._static)
        everywhere = self._placement.replicated
        placed = {part: jax.tree.map(lambda x: x.sharding, state[part]) for part in state}
        placed["result"] = everywhere
        out_shardings = tuple(placed[part] for part in gives)
        jitted = jax.jit(
            function,
            in_shardings=(
                *(placed[part] for part in takes),
                *jax.tree.map(lambda _: everywhere, args),
            ),
            out_shardings=out_shardings if len(gives) > 1 else out_shardings[0],
            donate_argnums=tuple(i for i, part in enumerate(takes) if part == "kv"),
        )
        return jitted.lower(*(state[part] for part in takes), *args).compile()
