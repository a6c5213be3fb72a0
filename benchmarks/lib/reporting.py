"""What the benchmarks share: their common options, and how results are written."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.lib.environment import describe_environment

ROOT = Path(__file__).resolve().parents[2]
GONE = {
    "benchmarks/hardware/gpu.py": "1caf6db0",
    "benchmarks/training/grpo_addition_compare.py": "b9b624fe",
}
"""Scripts of results that are kept without them, and the last commit that has each."""

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


def write_results(
    output: Path,
    title: str,
    command: str,
    lines: Sequence[str],
    content: Mapping[str, Any],
    *,
    facts: Sequence[str] = (),
    device: str | None = None,
) -> None:
    """Writes a report as Markdown, its data as JSON beside it, and the page of the folder.

    Args:
        output: The Markdown file.
        title: What was measured.
        command: The script, with the options that matter.
        lines: What follows the head.
        content: The data.
        facts: List items of the head, on the model and the workload.
        device: Where it was measured; None takes this process's.
    """
    environment = describe_environment(jax.devices()[0].device_kind if device is None else device)
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    head = [
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
    text = "\n".join([*head, *lines]) + "\n"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text)
    data = json.dumps({"environment": dataclasses.asdict(environment), **content}, indent=1)
    data = _INNERMOST.sub(lambda found: " ".join(found[0].split()), data)
    output.with_suffix(".json").write_text(data + "\n")
    write_page(output.parent)
    print(f"\n{text}\nwrote {output}")


def read_results(output: Path) -> dict[str, Any]:
    """The data of an earlier report, for scripts that add to it; {} if there is none."""
    path = output.with_suffix(".json")
    return json.loads(path.read_text()) if path.exists() else {}


def write_page(folder: Path) -> None:
    """Writes README.md of a folder of reports, from the first lines of each."""
    lines = [
        "# Benchmark results",
        "",
        "A row for each report here, written by the scripts. How to read them:",
        "[Benchmarks](../../docs/performance.md#benchmarks). Earlier results were last in commit",
        "`1caf6db0`, scripts of results that are kept without them in the commit behind each:",
        f"{', '.join(f'`{script}` (`{commit}`)' for script, commit in GONE.items())}.",
        "",
        "| file | what it measures | machine | date |",
        "|---|---|---|---|",
    ]
    for path in sorted(folder.glob("*.md")):
        if path.name == "README.md":
            continue
        title, _, rest = path.read_text().partition("\n")
        head = " ".join(rest.partition("\n|")[0].split())
        machine = re.search(r"(?:Machine: |, on )([^,;]+, \d+ cores)", head)
        date = re.search(r"\d{4}-\d{2}-\d{2}", head)
        cells = [f"[{path.stem}]({path.name})", title.removeprefix("# ")]
        cells += [machine[1] if machine else "", date[0] if date else ""]
        lines.append(f"| {' | '.join(cells)} |")
    (folder / "README.md").write_text("\n".join(lines) + "\n")
