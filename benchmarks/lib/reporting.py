"""What the benchmarks share: where they ran and how results are written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tunix_sgljax.bench.environment import Environment

ROOT = Path(__file__).resolve().parents[2]


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
    output.with_suffix(".json").write_text(json.dumps(data, indent=2) + "\n")
    print(f"\n{text}\nwrote {output}")
