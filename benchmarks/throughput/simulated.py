"""Orders of requests and over-sampling, simulated for several machines and sizes.

    python benchmarks/throughput/simulated.py            # about 5 minutes of one core
    python benchmarks/throughput/simulated.py --quick    # a smoke test

The ways of `tunix-sgljax simulate`, with its default lengths: lognormal, prompts' medians around
256 tokens (sigma 0.7), samples around those (sigma 0.5), at most 2,048. In the first epoch every
prompt is new. In a later one all have been answered before. Numbers are speeds over first come,
first served: steps in the time of one, without the trainer's part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from benchmarks.lib.page import write_page
from benchmarks.lib.reporting import make_parser, output_dir, write_results
from sgljax_engine.simulation import (
    TABLES,
    WAYS,
    LognormalLengths,
    Outcome,
    Plan,
    compare_ways,
    find_table,
)

SIZES = ((16, 64), (32, 128), (64, 256), (128, 512), (256, 1024))
"""Rows and requests."""

NUM_SAMPLES = 8


def simulate(hardware: str, rows: int, requests: int, epoch: str, num_steps: int) -> list[Outcome]:
    """Runs all ways of one size."""
    num_groups = requests // NUM_SAMPLES
    plan = Plan(num_groups=num_groups, num_samples=NUM_SAMPLES, num_rows=rows)
    if epoch == "later":
        plan = dataclasses.replace(plan, num_prompts=2 * num_groups)
    return list(compare_ways(plan, LognormalLengths(), find_table(hardware), num_steps))


def main(argv: Sequence[str] | None = None) -> None:
    """Simulates all machines and sizes."""
    args = make_parser(__doc__).parse_args(argv)
    sizes, num_steps = (SIZES[:1], 1) if args.quick else (SIZES, 6)
    lines, found = [], []
    for hardware, table in TABLES.items():
        lines += [f"## {hardware}", "", table.source, ""]
        lines += [f"| rows | requests | epoch | {' | '.join(list(WAYS)[1:])} | idle rows |"]
        lines += ["|---:|---:|---|" + "---:|" * len(WAYS)]
        for rows, requests in sizes:
            for epoch in ("first", "later"):
                outcomes = simulate(hardware, rows, requests, epoch, num_steps)
                speeds = " | ".join(f"{outcome.speed:.2f}" for outcome in outcomes[1:])
                idle = ", ".join(f"{outcome.idle:.0%}" for outcome in outcomes)
                lines.append(f"| {rows} | {requests} | {epoch} | {speeds} | {idle} |")
                print(hardware, lines[-1], flush=True)
                found.append(
                    {
                        "hardware": hardware,
                        "rows": rows,
                        "requests": requests,
                        "epoch": epoch,
                        "outcomes": [dataclasses.asdict(outcome) for outcome in outcomes],
                    }
                )
        lines.append("")
    write_results(
        output_dir(args) / "simulated.md",
        "Simulated rollouts",
        "benchmarks/throughput/simulated.py",
        lines,
        {"is_quick": args.quick, "found": found},
    )
    print(f"wrote {write_page(output_dir(args))}")


if __name__ == "__main__":
    main()
