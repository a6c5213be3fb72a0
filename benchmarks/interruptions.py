"""What it takes to interrupt an engine, and whether that does any harm.

    python benchmarks/interruptions.py            # about 5 minutes on 2 cores
    python benchmarks/interruptions.py --quick    # a smoke test

How long `pause_generation` takes at random moments while 64 requests decode, beside the dispatches
of the same run, none of which can be cut short; what CPU time a paused process uses; and cycles of
random pauses, updates and new requests, in which every answer is checked.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax

from bench_models import MODELS
from interruption_cycles import Cycles, format_cycles
from interruption_latency import (
    LATENCY_MODES,
    Idleness,
    Latencies,
    Load,
    format_idleness,
    format_latencies,
    measure_idleness,
    measure_latencies,
)
from reporting import ROOT, describe_environment, report_head, write_report
from sgljax_engine import Engine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured.

    Attributes:
        num_rows: Requests that run.
        max_prompt, max_new: Their tokens.
        num_pauses: Of each mode.
        period_s: Seconds of a pause whose CPU time is measured.
        num_cycles: Cycles of pauses and updates.
    """

    num_rows: int
    max_prompt: int
    max_new: int
    num_pauses: int
    period_s: float
    num_cycles: int


FULL = Effort(
    num_rows=64, max_prompt=64, max_new=512, num_pauses=100, period_s=5.0, num_cycles=1000
)
QUICK = Effort(num_rows=8, max_prompt=16, max_new=256, num_pauses=3, period_s=0.2, num_cycles=10)


def measure_pauses(model: str, effort: Effort) -> tuple[list[Latencies], list[Idleness]]:
    """Pauses of a loaded engine."""
    engine = Engine(
        model_config=MODELS[model].config,
        load_format="dummy",
        max_running_requests=effort.num_rows,
        max_model_len=effort.max_prompt + effort.max_new,
    )
    with engine:
        engine.warmup()
        load = Load(engine, effort.num_rows, max_prompt=effort.max_prompt, max_new=effort.max_new)
        latencies = [measure_latencies(load, mode, effort.num_pauses) for mode in LATENCY_MODES]
        idleness = [measure_idleness(load, mode, effort.period_s) for mode in LATENCY_MODES]
    load.close()
    return latencies, idleness


def main(argv: Sequence[str] | None = None) -> None:
    """Measures all and writes the results."""
    parser = argparse.ArgumentParser(description="Interruptions of a running engine.")
    parser.add_argument("--model", choices=sorted(MODELS), default="tiny", help="that is paused")
    parser.add_argument("--pauses", type=int, help="of each mode")
    parser.add_argument("--cycles", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output-dir", type=Path, help="instead of benchmarks/results")
    args = parser.parse_args(argv)
    effort = QUICK if args.quick else FULL
    effort = dataclasses.replace(
        effort,
        num_pauses=args.pauses or effort.num_pauses,
        num_cycles=args.cycles or effort.num_cycles,
    )
    latencies, idleness = measure_pauses(args.model, effort)
    for line in [*format_latencies(latencies), *format_idleness(idleness)]:
        print(line, flush=True)
    cycles = Cycles(args.seed)
    cycles.run(effort.num_cycles, sample_every=max(effort.num_cycles // 10, 1))
    folder = args.output_dir or ROOT / (
        "outputs/bench_quick" if args.quick else "benchmarks/results"
    )
    environment = describe_environment(jax.devices()[0].device_kind)
    lines = [
        *report_head(
            "Interruptions",
            "benchmarks/interruptions.py",
            environment,
            f"Pauses: {MODELS[args.model].in_words}, float32; {effort.num_rows} requests of up to "
            f"{effort.max_prompt} + {effort.max_new} tokens, engine defaults",
            "Cycles: the tests' model of 2 layers, hidden 32, so that the host's work shows",
        ),
        *format_latencies(latencies),
        *format_idleness(idleness),
        *format_cycles(effort.num_cycles, cycles.totals, cycles.samples),
    ]
    content = {
        "model": args.model,
        "effort": dataclasses.asdict(effort),
        "latencies": [dataclasses.asdict(each) for each in latencies],
        "idleness": [dataclasses.asdict(each) for each in idleness],
        "cycles": dataclasses.asdict(cycles.totals),
        "samples": [dataclasses.asdict(sample) for sample in cycles.samples],
    }
    write_report(folder / "interruptions.md", lines, environment, content)


if __name__ == "__main__":
    main()
