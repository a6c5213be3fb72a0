"""What the benchmarks share: their common options, where they ran, and how results are written."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.lib.environment import Environment, describe_environment

ROOT = Path(__file__).resolve().parents[2]
_INNERMOST = re.compile(r"[\[{][^\[\]{}]*[\]}]")
"""Lists and objects of JSON that hold no others: a line each."""


def make_parser(description: str | None, *, pairs: int | None = None) -> argparse.ArgumentParser:
    """A parser with the options that the benchmarks share.

    Args:
        description: The script's docstring, of which the first line is shown.
        pairs: Default of `--pairs`; None leaves that option out.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    if pairs is not None:
        parser.add_argument("--pairs", type=int, default=pairs, help="measurements of each run")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, for a smoke test")
    parser.add_argument("--output-dir", type=Path, help="instead of benchmarks/results")
    return parser


def output_dir(args: argparse.Namespace) -> Path:
    """Where results go: a quick run never replaces the results of the repository."""
    folder = "outputs/bench_quick" if args.quick else "benchmarks/results"
    return args.output_dir or ROOT / folder


def report_head(title: str, command: str, environment: Environment, *facts: str) -> list[str]:
    """The lines that every report in Markdown begins with.

    Args:
        title: Of the report.
        command: The script, with the options that matter.
        environment: Where it ran.
        facts: More list items, on the model and the workload.
    """
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    return [
        f"# {title}",
        "",
        f"Made on {environment.date} by `{command}`, which describes what is measured.",
        "",
        f"- Machine: {environment.cpu}, {environment.num_cores} cores; JAX device: "
        f"{environment.device}",
        f"- Python {environment.python}, {versions}",
        *(f"- {fact}" for fact in facts),
        "",
    ]


def write_report(
    output: Path, lines: list[str], environment: Environment, content: dict[str, Any]
) -> None:
    """Writes a report as Markdown, its data as JSON beside it, and prints it."""
    text = "\n".join(lines) + "\n"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text)
    data = {"environment": dataclasses.asdict(environment), **content}
    text_of_data = _INNERMOST.sub(
        lambda found: " ".join(found[0].split()), json.dumps(data, indent=1)
    )
    output.with_suffix(".json").write_text(text_of_data + "\n")
    print(f"\n{text}\nwrote {output}")


def write_results(
    output: Path,
    title: str,
    command: str,
    lines: Sequence[str],
    content: dict[str, Any],
    *,
    facts: Sequence[str] = (),
    device: str | None = None,
) -> None:
    """Writes a report with its head.

    Args:
        output: The Markdown file.
        title: Of the report.
        command: See `report_head`.
        lines: What follows the head.
        content: The data.
        facts: See `report_head`.
        device: Where it was measured; None takes this process's.
    """
    environment = describe_environment(device or jax.devices()[0].device_kind)
    head = report_head(title, command, environment, *facts)
    write_report(output, [*head, *lines], environment, content)
