"""The report as a Markdown table, and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tools.aot import AotReport, Estimate, OpCount, ProgramReport, StepLaunches

NOT_RUN = "Compiled by the vendor's compiler, not yet run."
_COLUMNS = (
    "program",
    "arguments",
    "temporaries",
    "peak",
    "GFLOP",
    "memory traffic",
    "exchanges",
    "kernels",
    "large copies",
)
_BASES = {
    "model": "weights and KV read once",
    "program": "all that the compiler counts, loops once",
}


def describe(report: AotReport, title: str, topology: str) -> str:
    """A table of the programs, with a line above and below it."""
    preview = report.preview
    rows = [list(_COLUMNS), ["---"] * len(_COLUMNS), *map(_cells, report.programs)]
    table = [f"| {' | '.join(row)} |" for row in rows]
    about = (
        f"{title}, {preview.dtype}, on {topology}: {preview.num_engines} engine(s) of "
        f"{preview.tp_size} device(s), max_model_len {preview.max_model_len}, attention "
        f"{preview.attention}. {NOT_RUN} Numbers are of one device."
    )
    memory = f"Memory: {'; '.join(_memory_lines(report))}."
    times = [f"- {_estimate_line(each)}" for each in report.estimates]
    basis = (
        "Least times at the chip's published rates, an estimate, if each request has "
        f"{preview.max_model_len} tokens:"
    )
    below = [basis, "", *times] if times else []
    counted = [
        f"- {_title(program)}: {_launches_line(program.launches)}"
        for program in report.programs
        if program.launches is not None
    ]
    launches = ["Launches of a step, read off the compiled program:", "", *counted, ""]
    verdict = "It fits." if report.problem is None else f"It does not fit: {report.problem}"
    after = [*(launches if counted else ()), f"{memory} {verdict}", "", *below]
    programs = [*table, ""] if report.programs else []
    return "\n".join([about, "", *programs, *after]).rstrip()


def to_json(report: AotReport, title: str, topology: str) -> dict[str, Any]:
    """The report as JSON; bytes are of one device, except in `preview`."""
    values = dataclasses.asdict(report)
    del values["preview"]["compilation_cache"]  # a folder of this machine
    return {
        "model": title,
        "topology": topology,
        "problem": report.problem,
        "held_bytes": report.held_bytes,
        "needed_bytes": report.needed_bytes,
        **values,
    }


def _memory_lines(report: AotReport) -> Iterator[str]:
    preview, memory = report.preview, report.preview.memory
    weights = preview.weights_bytes / preview.tp_size
    yield f"weights {size(weights)}"
    if memory is not None:
        yield (
            f"KV {size(memory.kv_bytes / preview.tp_size)} for {memory.kv_tokens} tokens of an "
            f"engine, as {memory.rule} says"
        )
    if report.programs and all(program.memory is not None for program in report.programs):
        yield f"with the program that needs most {size(report.needed_bytes)}"
    yield f"there are {size(report.chip.usable_bytes)} for programs"


def _title(program: ProgramReport) -> str:
    units = {"decode": "rows", "copy_pages": "pages"}
    return f"{program.name} of {program.size} {units.get(program.name, 'tokens')}"


def _cells(program: ProgramReport) -> list[str]:
    memory = program.memory
    if memory is None:
        return [_title(program), f"does not fit: {program.problem}", *[""] * (len(_COLUMNS) - 2)]
    return [
        _title(program),
        size(memory.argument_bytes),
        size(memory.temp_bytes),
        size(memory.peak_bytes),
        "not counted" if program.flops is None else f"{program.flops / 1e9:.1f}",
        "not counted" if program.memory_bytes is None else size(program.memory_bytes),
        _total(program.collectives),
        _total(program.kernels),
        _total(program.copies),
    ]


def _total(ops: Sequence[OpCount]) -> str:
    if not ops:
        return "none"
    return f"{sum(op.count for op in ops)}, {size(sum(op.num_bytes for op in ops))}"


def _launches_line(launches: StepLaunches) -> str:
    copies = launches.large_copies or "none"
    return (
        f"{launches.total}, {launches.per_layer:.1f} a layer: {launches.products} products, "
        f"{launches.own} kernels of ours, {launches.fusions} other fusions, {launches.copies} "
        f"copies, {launches.conditionals} conditionals, {launches.others} others; copies of KV "
        f"pages or a weight: {copies}"
    )


def _estimate_line(estimate: Estimate) -> str:
    return (
        f"{estimate.name}, {_BASES[estimate.basis]}: {estimate.step_s * 1e3:.2f} ms, "
        f"{estimate.tokens_per_s:,.0f} tokens/s, limited by {estimate.bound}"
    )


def size(num_bytes: float) -> str:
    """Bytes for people: GB, or MB below 10 MB."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.2f} MB"
