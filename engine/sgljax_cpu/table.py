"""A chain's work as a table of integers, which its handler reads (`threads`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Pointer(NamedTuple):
    """A value of an operation: an address inside a buffer.

    Attributes:
        buffer: Index among the arguments of the call, followed by its results.
        offset: Bytes from the buffer's start.
    """

    buffer: int
    offset: int = 0


class Work(NamedTuple):
    """One operation of a chain.

    Attributes:
        kernel: Index of its function among the chain's.
        num_chunks: Number of chunks, each done by one thread.
        values: What the function reads with `read_values`.
    """

    kernel: int
    num_chunks: int
    values: Sequence[Pointer | int]


def encode(phases: Sequence[Sequence[Work]]) -> list[int]:
    """The table of a chain, as the handler reads it.

    Header: phases, operations, values, largest number of chunks of a phase. Each phase: its
    operations, its chunks. Each operation: kernel, chunks, values. Each value: buffer or -1, offset
    or number.
    """
    works = [work for phase in phases for work in phase]
    totals = [sum(work.num_chunks for work in phase) for phase in phases]
    table = [len(phases), len(works), sum(len(work.values) for work in works), max(totals)]
    for phase, total in zip(phases, totals, strict=True):
        table += [len(phase), total]
        for work in phase:
            table += [work.kernel, work.num_chunks, len(work.values)]
            for value in work.values:
                table += [-1, value] if isinstance(value, int) else value
    return table
