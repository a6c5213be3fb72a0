"""What an update costs requests that run: re-prefilled under the new weights, or going on in place.

    python benchmarks/update_modes.py            # small, about 4 minutes on 2 cores
    python benchmarks/update_modes.py --quick    # tiny, a smoke test

The times of `weight_sync.py` for each mode, with all rows of the workload decoding. Retracted
requests stand still for the swap and for their prefill; those in place for the swap alone, while
the new weights are made beside the decode loop on the same cores.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax

from ceilings import measure_ceilings
from reporting import ROOT, report_head, write_report
from roofline import weight_bytes
from tunix_sgljax.bench.environment import describe_environment
from tunix_sgljax.bench.models import make_tunix_model
from tunix_sgljax.bench.shapes import MODELS
from weight_sync import format_weight_sync, measure_weight_sync, sync_workload


def main(argv: Sequence[str] | None = None) -> None:
    """Measures both modes and writes the results."""
    parser = argparse.ArgumentParser(description="Weight updates while requests run.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output-dir", type=Path, help="instead of benchmarks/results")
    args = parser.parse_args(argv)
    name = "tiny" if args.quick else "small"
    repeats = 1 if args.quick else args.repeats
    config = MODELS[name].config
    workload = sync_workload(config.vocab_size, is_quick=args.quick)
    ceilings = measure_ceilings(weight_bytes(config), seconds=0.02 if args.quick else 0.5)
    model = make_tunix_model(config)
    environment = describe_environment(jax.devices()[0].device_kind)
    lines = report_head(
        "Updates while requests run",
        "benchmarks/update_modes.py",
        environment,
        f"{MODELS[name].in_words}, float32; {workload.num_rows} rows of `rl_uniform` decode, at "
        "most 8 steps a dispatch",
        f"Ceilings: {ceilings.in_words()}",
    )
    content = {}
    for mode in ("retract", "in_place"):
        sync = measure_weight_sync(model, workload, repeats=repeats, mode=mode)
        head, *table = format_weight_sync(sync)
        lines += [f"{head}: {mode}", *table]
        content[mode] = dataclasses.asdict(sync)
        print("\n".join([mode, *table]), flush=True)
    folder = args.output_dir or ROOT / (
        "outputs/bench_quick" if args.quick else "benchmarks/results"
    )
    write_report(folder / "update_modes.md", lines, environment, content)


if __name__ == "__main__":
    main()
