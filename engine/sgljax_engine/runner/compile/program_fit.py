"""The memory that a compiled program takes, as its compiler says."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax


class ProgramDoesNotFit(Exception):
    """A program needs more than the memory of its devices; the message is the compiler's."""


@contextlib.contextmanager
def checked_fit() -> Iterator[None]:
    """Raises ProgramDoesNotFit where compilation fails for lack of memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first = str(error).strip().splitlines()[0]
        raise ProgramDoesNotFit(first.removeprefix("RESOURCE_EXHAUSTED: ")) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramMemory:
    """Bytes of a program on one device, by its compiler.

    Arguments have the padding of their layouts; aliases are results in the memory of donated
    arguments.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int

    @classmethod
    def of(cls, compiled: Any) -> ProgramMemory:
        """Memory of a `jax.stages.Compiled`, as its compiler reports it."""
        stats = compiled.memory_analysis()
        return cls(
            argument_bytes=stats.argument_size_in_bytes,
            output_bytes=stats.output_size_in_bytes,
            alias_bytes=stats.alias_size_in_bytes,
            temp_bytes=stats.temp_size_in_bytes,
            code_bytes=stats.generated_code_size_in_bytes,
        )

    @property
    def extra_bytes(self) -> int:
        return self.output_bytes - self.alias_bytes + self.temp_bytes + self.code_bytes

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.extra_bytes
