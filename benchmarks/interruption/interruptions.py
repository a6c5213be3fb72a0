"""What it takes to interrupt an engine, and whether that does any harm.

    python benchmarks/interruption/interruptions.py            # about 6 minutes on 2 cores
    python benchmarks/interruption/interruptions.py --quick    # a smoke test
    python benchmarks/interruption/interruptions.py --only-pauses    # about 2 minutes, prints alone

How long `pause_generation` takes at random moments while 64 requests decode, beside the dispatches
of the same run, none of which can be cut short, by default and with a `max_dispatch_s` that most
dispatches fill; what CPU time a paused process uses; and cycles of random pauses, updates and new
requests, in which every answer is checked.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from benchmarks.interruption.interruption_cycles import Cycles, format_cycles
from benchmarks.interruption.interruption_latency import (
    LATENCY_MODES,
    Idleness,
    Latencies,
    Load,
    format_idleness,
    format_latencies,
    measure_idleness,
    measure_latencies,
)
from benchmarks.lib.reporting import ROOT, report_head, write_report
from sgljax_engine import Engine, SchedulerConfig
from tunix_sgljax.bench.environment import describe_environment
from tunix_sgljax.bench.shapes import MODELS

MAX_DISPATCHES_S = (SchedulerConfig().max_dispatch_s, 0.1)
"""The default; then one that is shorter than the time between two requests that finish, which end a
dispatch early when others wait."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured.

    Attributes:
        num_rows: Requests that run.
        max_prompt, max_new: Their tokens.
        num_pauses: Of each mode.
        speed_s: Seconds of uninterrupted load before them.
        period_s: Seconds of a pause whose CPU time is measured.
        num_cycles: Cycles of pauses and updates.
    """

    num_rows: int
    max_prompt: int
    max_new: int
    num_pauses: int
    speed_s: float
    period_s: float
    num_cycles: int


FULL = Effort(
    num_rows=64,
    max_prompt=64,
    max_new=512,
    num_pauses=100,
    speed_s=4.0,
    period_s=5.0,
    num_cycles=1000,
)
QUICK = Effort(
    num_rows=8,
    max_prompt=16,
    max_new=256,
    num_pauses=3,
    speed_s=0.5,
    period_s=0.2,
    num_cycles=10,
)


@contextlib.contextmanager
def loaded_engine(model: str, effort: Effort, max_dispatch_s: float) -> Iterator[Load]:
    """Requests that keep an engine's rows busy."""
    engine = Engine(
        model_config=MODELS[model].config,
        load_format="dummy",
        max_running_requests=effort.num_rows,
        batch_buckets=(effort.num_rows,),  # which are always full
        max_model_len=effort.max_prompt + effort.max_new,
        max_dispatch_s=max_dispatch_s,
    )
    with engine:
        engine.warmup()
        load = Load(engine, effort.num_rows, max_prompt=effort.max_prompt, max_new=effort.max_new)
        yield load
    load.close()


def measure_pauses(model: str, effort: Effort) -> list[Latencies]:
    """Pauses of a loaded engine, of every mode with every bound on a dispatch."""
    latencies: list[Latencies] = []
    for max_dispatch_s in MAX_DISPATCHES_S:
        with loaded_engine(model, effort, max_dispatch_s) as load:
            latencies += [
                measure_latencies(load, mode, effort.num_pauses, max_dispatch_s, effort.speed_s)
                for mode in LATENCY_MODES
            ]
    return latencies


def measure_idle_pauses(model: str, effort: Effort) -> list[Idleness]:
    """Engines with default settings that stay paused for a while."""
    with loaded_engine(model, effort, MAX_DISPATCHES_S[0]) as load:
        return [measure_idleness(load, mode, effort.period_s) for mode in LATENCY_MODES]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures all and writes the results."""
    parser = argparse.ArgumentParser(description="Interruptions of a running engine.")
    parser.add_argument("--model", choices=sorted(MODELS), default="tiny", help="that is paused")
    parser.add_argument("--pauses", type=int, help="of each mode")
    parser.add_argument("--cycles", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only-pauses", action="store_true", help="how long they take; no report")
    parser.add_argument("--output-dir", type=Path, help="instead of benchmarks/results")
    args = parser.parse_args(argv)
    effort = QUICK if args.quick else FULL
    effort = dataclasses.replace(
        effort,
        num_pauses=args.pauses or effort.num_pauses,
        num_cycles=args.cycles or effort.num_cycles,
    )
    latencies = measure_pauses(args.model, effort)
    print("\n".join(format_latencies(latencies)), flush=True)
    if args.only_pauses:
        return
    idleness = measure_idle_pauses(args.model, effort)
    print("\n".join(format_idleness(idleness)), flush=True)
    cycles = Cycles(args.seed)
    cycles.run(effort.num_cycles, sample_every=max(effort.num_cycles // 10, 1))
    folder = args.output_dir or ROOT / (
        "outputs/bench_quick" if args.quick else "benchmarks/results"
    )
    environment = describe_environment(jax.devices()[0].device_kind)
    lines = [
        *report_head(
            "Interruptions",
            "benchmarks/interruption/interruptions.py",
            environment,
            f"Pauses: {MODELS[args.model].in_words}, float32; {effort.num_rows} requests of up to "
            f"{effort.max_prompt} + {effort.max_new} tokens, engine defaults but `max_dispatch_s`",
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
