"""Writes benchmarks/results/accelerators.md, and the table of docs/accelerators.md from it.

    python docs/make_accelerators.py ["Qwen3.5-0.8B on one v5e" ...]

Compiles for minutes; given headings, only those reports. A report whose compiler is not installed
is kept as it is; those of TPUs need libtpu, that of a GPU needs JAX's CUDA plugin. A test compares
both pages with what this writes.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

OUTPUT = Path(__file__).with_name("accelerators.md")
BEGIN = "<!-- table: made by docs/make_accelerators.py -->\n"
END = "<!-- end of table -->\n"
_ROOT = Path(__file__).parents[1]
REPORTS_OUTPUT = _ROOT / "benchmarks" / "results" / "accelerators.md"
_NO_COMPILER = 2
"""The exit code of `aot` when it cannot start; 1 is an engine that does not fit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """A report of a model.

    Attributes:
        model: The model's name.
        where: The devices, as its heading has them.
        arguments: What `python -m tools.aot` is asked.
        note: What to know about it.
    """

    model: str
    where: str
    arguments: str
    note: str

    @property
    def heading(self) -> str:
        """The heading of its section."""
        return f"{self.model} on {self.where}"

    @property
    def command(self) -> str:
        """The command that makes it."""
        return f"python -m tools.aot {self.arguments}"


_ROOM = "`num_kv_tokens` is left to the engine, which takes a share of the free memory."

_HYBRID_NOTES = {
    "v5e": """Of 24 layers 18 are gated delta nets. In a decode step each of them is one call of a
kernel that reads the states of all rows in their slots and writes them there.""",
    "v6e": "The same for a v6e.",
    "v5p": "The same for a v5p.",
}

REPORTS = (
    Report(
        model="Qwen3-0.6B",
        where="one v5e",
        arguments="--model qwen3-0.6b --topology v5e:1x1 --engine max_model_len=1024 "
        "--engine max_running_requests=64 --engine num_kv_tokens=65536",
        note="""A layer's attention is one call of [the kernel for
TPUs](../../docs/architecture.md#the-tpu-kernel), which also writes the new keys and values: no KV
page and no weight is copied in a decode step. Two calls rotate its queries and keys; the large copy
of prefill is the embeddings of its tokens, on the chip. With a pool of 26,624 tokens, whose arrays
of pages memory on the chip could hold, a decode step moves as much. With
`attention_backend="xla"` the same decode program took 7.58 GB of temporaries and made 168 large
copies, of 22.55 GB.""",
    ),
    Report(
        model="Qwen3-8B",
        where="eight v5e, as one engine",
        arguments="--model qwen3-8b --topology v5e:2x4 --tp 8 --engine max_model_len=4096",
        note="""Each layer has two sums over the devices. What sampling exchanges beside them is
small: the logits stay where they are.""",
    ),
    Report(
        model="Qwen3-8B",
        where="eight v5e, as two engines of four",
        arguments="--model qwen3-8b --topology v5e:2x4 --tp 4 --engine max_model_len=4096",
        note="The programs are those of one engine; tokens per second are of both.",
    ),
    Report(
        model="Llama-3.2-1B",
        where="one v6e",
        arguments="--model llama-3.2-1b --topology v6e:1x1 --engine max_model_len=4096 "
        "--engine max_running_requests=64",
        note=f"""Two kv heads of 64 share a row of a page, so the kernel serves them too. XLA
rotates heads of 64, and copies activations of prefill. {_ROOM}""",
    ),
    Report(
        model="Gemma 3 4B",
        where="one v6e",
        arguments="--model gemma-3-4b-it --topology v6e:1x1 --engine max_model_len=4096 "
        "--engine max_running_requests=64",
        note=f"Text only. {_ROOM}",
    ),
    Report(
        model="Gemma 4 E2B",
        where="one v5e",
        arguments="--model gemma-4-e2b --topology v5e:1x1 --engine max_model_len=4096 "
        "--engine max_running_requests=32",
        note=f"""Text only. The last 20 of 35 layers read the keys of earlier ones. Prefill, which
is to write keys alone, ends before them, after 15 kernel calls. The table of embeddings for each
layer, half of the weights, is not copied. {_ROOM}""",
    ),
    *(
        Report(
            model="Qwen3.5-0.8B",
            where=f"one {chip}",
            arguments=f"--model tests/real_configs/qwen3.5-0.8b --topology {chip}:1x1 "
            "--engine max_model_len=1024 --engine max_running_requests=64 "
            "--engine num_kv_tokens=65536 --programs largest",
            note=note,
        )
        for chip, note in _HYBRID_NOTES.items()
    ),
    Report(
        model="Qwen3-0.6B",
        where="one H100",
        arguments="--config configs/qwen3_0p6b_gpu.yaml --topology h100:1",
        note="XLA's sort for GPUs is another one where a GPU is present. The engine has run "
        "on an H100 since: see [GPUs](../../docs/accelerators.md#gpus).",
    ),
)

_SUMMARY = (
    "| model | chip | engines x devices | KV tokens of an engine | peak of a device "
    "| temporaries of decode | least time of a decode step |\n"
    "|---|---|---|---|---|---|---|"
)
_TITLE = """# Programs compiled for accelerators

Made by `docs/make_accelerators.py` with the vendors' compilers, not run. The tables are those of
`python -m tools.aot`; [Accelerators](../../docs/accelerators.md) says what their columns mean.
"""


def render(page: str, reports: str) -> str:
    """The page of the documentation with its table made from the reports.

    Raises:
        ValueError: the page has no place for it.
    """
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{OUTPUT.name} has no {BEGIN.strip()} and {END.strip()}")
    bodies = sections(reports)
    rows = [summary_row(report, bodies[report.heading]) for report in REPORTS]
    return head + BEGIN + "\n" + "\n".join([_SUMMARY, *rows]) + "\n\n" + END + tail


def render_reports(text: str, made: Mapping[str, str]) -> str:
    """The page of reports with some of them replaced.

    Args:
        text: The page.
        made: Bodies of sections by heading, as `body` gives them; others are kept.

    Raises:
        ValueError: a report is neither made nor in the page.
    """
    bodies = {**sections(text), **made}
    parts = [_TITLE]
    for report in REPORTS:
        if report.heading not in bodies:
            raise ValueError(
                f"{REPORTS_OUTPUT.name} has no report of {report.heading}: install its compiler"
            )
        parts += [f"## {report.heading}\n", _filled(report.note), bodies[report.heading]]
    return "\n".join(parts)


def sections(text: str) -> dict[str, str]:
    """Bodies of the sections by heading, without their notes."""
    found = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)[1:]
    pairs = zip(found[::2], found[1::2], strict=True)
    return {heading: part[part.index("Made by ") :].rstrip() + "\n" for heading, part in pairs}


def body(report: Report, compiler: str, date: str, markdown: str) -> str:
    """The body of a section: how it was made, and what the command wrote."""
    return f"Made by `{report.command}` with {compiler} on {date}:\n\n{markdown.strip()}\n"


def summary_row(report: Report, text: str) -> str:
    """A report's row of the summary, read off its body."""
    engines, devices = (
        _find(pattern, text) for pattern in (r"(\d+) engine\(s\) of", r"of (\d+) device\(s\)")
    )
    tokens = int(_find(r"for (\d+) tokens of an engine", text))
    cells = [
        report.model,
        _find(r", on (\w+):[\dx]+: ", text),
        f"{engines} x {devices}",
        f"{tokens:,}",
        _find(r"with the program that needs most ([\d.]+ \w+)", text),
        _find(r"\| decode of \d+ rows \| [^|]+ \| ([\d.]+ \w+) \|", text),
        _find(r"decode, weights and KV read once: ([\d.]+ ms)", text),
    ]
    return f"| {' | '.join(cells)} |"


def _find(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"a report has no {pattern!r}")
    return match[1]


def _filled(text: str) -> str:
    lines = textwrap.fill(
        " ".join(text.split()), width=110, break_long_words=False, break_on_hyphens=False
    )
    return lines + "\n"


def _make_all() -> Iterator[tuple[str, str]]:
    for report in REPORTS:
        if len(sys.argv) > 1 and report.heading not in sys.argv[1:]:
            continue
        sys.stderr.write(f"compiling {report.heading}\n")
        done = subprocess.run(  # a process each: compilers read their settings once
            [sys.executable, *shlex.split(report.command)[1:]],
            cwd=_ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == _NO_COMPILER and "is not installed" in done.stderr:
            sys.stderr.write(f"kept {report.heading}: {done.stderr}")
            continue
        if done.returncode not in (0, 1):
            raise RuntimeError(f"{report.command}: {done.stderr}")
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        yield report.heading, body(report, _compiler(report), today, done.stdout)


def _compiler(report: Report) -> str:
    """The compiler's name and version, and JAX's."""
    jax = importlib.metadata.version("jax")
    if "h100" in report.arguments:
        return f"JAX's CUDA plugin {importlib.metadata.version('jax-cuda13-plugin')}"
    library = os.environ.get("TPU_LIBRARY_PATH")
    path = sys.path if library is None else [str(Path(library).parents[1])]
    found = [each.version for each in importlib.metadata.distributions(name="libtpu", path=path)]
    return f"{' '.join(['libtpu', *found[:1]])}, JAX {jax},"


if __name__ == "__main__":
    reports = render_reports(REPORTS_OUTPUT.read_text(encoding="utf-8"), dict(_make_all()))
    REPORTS_OUTPUT.write_text(reports, encoding="utf-8")
    OUTPUT.write_text(render(OUTPUT.read_text(encoding="utf-8"), reports), encoding="utf-8")
