"""Random operations on the prefix cache, each checked against a model of plain dictionaries.

    python benchmarks/exactness/radix_soak.py --operations 1000000

The operations and the model are those of `tests/engine/test_radix.py`, which does fewer of them.
After each one pages, handles, eviction order and integrity are compared; the first difference ends
the run. Everything follows from the seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path

from benchmarks.lib.reporting import ROOT, report_head, write_report
from tunix_sgljax.bench.environment import describe_environment

sys.path.insert(0, str(ROOT))
from tests.engine.radix_model import Totals, random_operations


def main() -> None:
    """Runs and writes the results."""
    parser = argparse.ArgumentParser(description="Soak test of the prefix cache.")
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/radix_soak.md")
    args = parser.parse_args()
    start = time.perf_counter()
    totals: Totals = random_operations(args.seed, args.operations)
    seconds = time.perf_counter() - start
    environment = describe_environment("none; host code only")
    lines = [
        *report_head(
            "Random operations on the prefix cache",
            f"benchmarks/exactness/radix_soak.py --operations {args.operations} --seed {args.seed}",
            environment,
        ),
        "| operations | prefixes found | pages evicted | pages merged | resets | failures | s |",
        "|---:|---:|---:|---:|---:|---:|---:|",
        f"| {totals.operations} | {totals.hits} | {totals.evictions} | {totals.merges} "
        f"| {totals.resets} | 0 | {seconds:.0f} |",
    ]
    content = {
        "seed": args.seed,
        "totals": dataclasses.asdict(totals),
        "failures": 0,
        "seconds": seconds,
    }
    write_report(args.output, lines, environment, content)


if __name__ == "__main__":
    main()
