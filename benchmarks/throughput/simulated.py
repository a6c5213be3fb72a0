"""Orders of requests and over-sampling, simulated for several machines, sizes and lengths.

    python benchmarks/throughput/simulated.py --lengths lognormal --hardware cpu  # some minutes
    python benchmarks/throughput/simulated.py --quick                             # a smoke test

What is chosen is added to the results of earlier runs. Lengths:

- `lognormal`: as `tools.simulation` draws them, prompts' medians around 256 tokens (sigma
  0.7), samples around those (sigma 0.5), at most 2,048.
- `rl_longtail`: those of the workload of that name, whose prompts have no length of their own.
- `demo`: real answers to the sums of `configs/grpo_addition.yaml`, which `long_tail.py` recorded.

In the first epoch every prompt is new. In a later one all have been answered before. Numbers are
speeds over first come, first served: steps in the time of one, without the trainer's part. In
parentheses the standard error of longest first, from steps in pairs of the same answers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.page import write_page
from benchmarks.lib.reporting import ROOT, make_parser, output_dir, write_results
from benchmarks.lib.workloads import make_workload
from tools.simulation import (
    TABLES,
    WAYS,
    Lengths,
    LognormalLengths,
    Outcome,
    Plan,
    RecordedLengths,
    compare_ways,
    find_table,
    read_lengths,
)

SIZES = tuple((rows, requests) for rows in (64, 128, 256) for requests in (64, 256, 1024))
"""Rows and requests."""

NUM_SAMPLES = 8

WORST = 0.99
"""What the default may lose."""


def _workload_lengths() -> Lengths:
    workload = make_workload("rl_longtail", 4096)
    return RecordedLengths(np.reshape(workload.output_lengths, (-1, workload.num_samples)).tolist())


LENGTHS: dict[str, Callable[[], Lengths]] = {
    "lognormal": LognormalLengths,
    "rl_longtail": _workload_lengths,
    "demo": lambda: read_lengths(ROOT / "benchmarks/results/long_tail_demo.json"),
}


def simulate(
    hardware: str, lengths: Lengths, size: tuple[int, int], epoch: str, num_steps: int
) -> list[Outcome]:
    """Runs all ways of one size."""
    rows, requests = size
    num_groups = requests // NUM_SAMPLES
    plan = Plan(num_groups=num_groups, num_samples=NUM_SAMPLES, num_rows=rows)
    if epoch == "later":
        plan = dataclasses.replace(plan, num_prompts=2 * num_groups)
    return list(compare_ways(plan, lengths, find_table(hardware), num_steps))


def main(argv: Sequence[str] | None = None) -> None:
    """Simulates what is chosen, and writes the tables of all that has been."""
    args = _parse(argv)
    output = output_dir(args) / "simulated.md"
    found = _earlier(output.with_suffix(".json"))
    sizes, num_steps = (((4, 16),), 2) if args.quick else (SIZES, args.steps)
    for name in args.lengths:
        lengths = LENGTHS[name]()
        for hardware in args.hardware:
            found[f"{name}, {hardware}"] = rows = []
            for size in sizes:
                for epoch in ("first", "later"):
                    outcomes = simulate(hardware, lengths, size, epoch, num_steps)
                    key = {"rows": size[0], "requests": size[1], "epoch": epoch}
                    rows.append(key | {"outcomes": [dataclasses.asdict(each) for each in outcomes]})
                    print(name, hardware, _line(rows[-1]), flush=True)
    write_results(
        output,
        "Simulated rollouts",
        "benchmarks/throughput/simulated.py",
        _tables(found),
        {"is_quick": args.quick, "num_steps": num_steps, "found": found},
    )
    print(f"wrote {write_page(output_dir(args))}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=["lognormal"])
    parser.add_argument("--hardware", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--steps", type=int, default=8, help="steps of each way (8)")
    return parser.parse_args(argv)


def _earlier(path: Path) -> dict[str, list[dict[str, Any]]]:
    """What earlier runs found."""
    return json.loads(path.read_text())["found"] if path.exists() else {}


def _line(row: dict[str, Any]) -> str:
    _, longest, *others = row["outcomes"]
    speeds = [f"{longest['speed']:.3f} ({longest['error']:.3f})"]
    speeds += [f"{each['speed']:.2f}" for each in others]
    idle = ", ".join(f"{each['idle']:.0%}" for each in row["outcomes"])
    where = f"{row['rows']} | {row['requests']} | {row['epoch']}"
    return f"| {where} | {' | '.join(speeds)} | {idle} |"


def _tables(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    lines = [_verdict([row for rows in found.values() for row in rows]), ""]
    for title, rows in found.items():
        lines += [f"## {title}", "", TABLES[title.partition(", ")[2]].source, ""]
        lines += [f"| rows | requests | epoch | {' | '.join(list(WAYS)[1:])} | idle rows |"]
        lines += ["|---:|---:|---|" + "---:|" * len(WAYS), *map(_line, rows), ""]
    return lines


def _verdict(rows: list[dict[str, Any]]) -> str:
    """How often longest first loses, and how much it brings at most."""
    longest = [row["outcomes"][1] for row in rows]
    speeds = [each["speed"] for each in longest]
    lost = sum(speed < WORST for speed in speeds)
    surely = sum(each["speed"] + 2 * each["error"] < WORST for each in longest)
    return (
        f"Longest first: {min(speeds):.3f} to {max(speeds):.3f} in {len(rows)} cases; below "
        f"{WORST} in {lost}, by more than two standard errors in {surely}."
    )


if __name__ == "__main__":
    main()
