"""Writes the page of a folder of results: a row for each report, and which benchmarks ended.

    python benchmarks/lib/page.py [FOLDER]

A row is made of the first lines of a report. The section on ended benchmarks is kept as it is.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from benchmarks.lib.reporting import ROOT

ENDED = "## Ended benchmarks"
"""Heading of the section that is kept."""


def report_rows(folder: Path) -> list[str]:
    """A row for each report, with its head; what a report does not say stays empty."""
    lines = ["| file | what it measures | machine | date | command |", "|---|---|---|---|---|"]
    for path in sorted(folder.glob("*.md")):
        if path.name == "README.md":
            continue
        title, _, rest = path.read_text().partition("\n")
        head = " ".join(rest.partition("\n|")[0].split())
        machine = re.search(r"(?:Machine: |, on )([^,;]+, \d+ cores)", head)
        date = re.search(r"\d{4}-\d{2}-\d{2}", head)
        command = re.search(r"`((?:python )?[^` ]+\.py[^`]*)`", head)
        cells = [
            f"[{path.stem}]({path.name})",
            title.removeprefix("# "),
            machine[1] if machine else "",
            date[0] if date else "",
            f"`{command[1].removeprefix('python ')}`" if command else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def write_page(folder: Path) -> Path:
    """Writes README.md of a folder; returns its path."""
    page = folder / "README.md"
    _, mark, ended = page.read_text().partition(ENDED) if page.exists() else ("", "", "")
    lines = [
        "# Benchmark results",
        "",
        "Made by `benchmarks/lib/page.py` from the files here: the current result of each model",
        "and machine. How to read them: [Benchmarks](../../docs/performance.md#benchmarks).",
        *(
            ["Older and superseded ones are in [the archive](archive/README.md)."]
            if (folder / "archive").exists()
            else []
        ),
        "",
        *report_rows(folder),
        "",
    ]
    page.write_text("\n".join(lines) + (f"\n{mark}{ended}" if mark else ""))
    return page


def main() -> None:
    """Writes the page of one folder."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "benchmarks/results"
    print(f"wrote {write_page(folder)}")


if __name__ == "__main__":
    main()
