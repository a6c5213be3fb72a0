"""Our engine against Tunix's vanilla sampler, on the same weights and requests, in one run.

    make bench                                        # tiny and small, all workloads
    make bench BENCH_ARGS="--models small --workloads rl_longtail --pairs 7"
    python benchmarks/throughput/compare.py --quick              # a smoke test, in a few minutes

For each model the machine's ceilings; then, workload by workload, first greedy tokens, which must
agree, and pairs of runs in alternating order. The vanilla sampler runs as one whole batch, and in
the best of some micro-batches if that promises to be faster. What counts is useful tokens a second:
those that a request asked for. Everything is compiled before. docs/performance.md says how to read
the results.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import time
import warnings
from collections.abc import Sequence

from tunix.models.qwen3.model import Qwen3

from benchmarks.hardware.ceilings import Ceilings, measure_ceilings
from benchmarks.hardware.roofline import decode_step_bytes, limit_by_part, useful_work, weight_bytes
from benchmarks.interruption.weight_sync import (
    WeightSync,
    format_weight_sync,
    measure_weight_sync,
    sync_workload,
)
from benchmarks.lib.comparison import PeerResult, WorkloadResult, format_comparison
from benchmarks.lib.measure import count_agreed, run_pairs, timed
from benchmarks.lib.models import make_tunix_model
from benchmarks.lib.peers import OURS, Peer, SglJaxPeer
from benchmarks.lib.reporting import make_parser, output_dir, write_results
from benchmarks.lib.shapes import MODELS, BenchModel
from benchmarks.lib.vanilla import VanillaPeer, batches
from benchmarks.lib.workloads import WORKLOADS, Workload, make_workload
from sgljax_engine import ModelConfig

DEFAULT_MODELS = ("tiny", "small")

_PROBE_STEPS = 16
_MICRO_BATCHES = (8, 16, 32, 64)


def measure_peer(ours: Peer, peer: Peer, workload: Workload, num_pairs: int) -> PeerResult:
    """Pairs of runs; the order within a pair alternates. Both are compiled before."""
    num_agreed, num_greedy = count_agreed(ours, peer, workload)
    print(f"  {num_agreed} of {num_greedy} greedy tokens are those of {peer.name}", flush=True)
    timed(peer, workload)  # compiles
    peer.first_token_s(workload)
    first_token_s = peer.first_token_s(workload)
    our_runs_s, runs_s = run_pairs(ours, peer, workload, num_pairs, _tell)
    return PeerResult(
        name=peer.name,
        batch_size=peer.batch_size,
        num_agreed=num_agreed,
        first_token_s=first_token_s,
        runs_s=runs_s,
        our_runs_s=our_runs_s,
    )


def _tell(text: str) -> None:
    print(text, flush=True)


def summarize_ours(
    ours: Peer, workload: Workload, results: Sequence[PeerResult], num_runs: int
) -> PeerResult:
    """Our runs of all pairs together; without a peer, runs of ours alone."""
    runs_s = [seconds for result in results for seconds in result.our_runs_s]
    runs_s = runs_s or [timed(ours, workload) for _ in range(num_runs)]
    return PeerResult(
        name=OURS,
        batch_size=ours.batch_size,
        num_agreed=None,
        first_token_s=ours.first_token_s(workload),
        runs_s=runs_s,
        our_runs_s=runs_s,
    )


def best_micro_batch(
    model: Qwen3, config: ModelConfig, workload: Workload, whole_s: float
) -> int | None:
    """The micro-batch size with the least estimated time; None if none beats `whole_s`.

    Tried are 8, 16, 32 and 64 requests, as far as there are more in all; of few requests, 1.

    Args:
        model: Tunix's.
        config: Its shape.
        workload: What it would run.
        whole_s: Seconds that it takes in one whole batch.
    """
    total = len(workload.output_lengths)
    sizes = [size for size in _MICRO_BATCHES if size < total] or [1] * (total > 1)
    seconds = {size: _estimate_s(model, config, workload, size) for size in sizes}
    for size, estimate in seconds.items():
        print(f"  batches of {size}: about {estimate:.1f} s", flush=True)
    best = min(seconds, key=lambda size: seconds[size], default=None)
    return best if best is not None and seconds[best] < whole_s else None


def _estimate_s(model: Qwen3, config: ModelConfig, workload: Workload, size: int) -> float:
    """From a run of the first micro-batch with one step and one with 17 steps."""
    peer = VanillaPeer(model, config, workload, size)
    num_steps = min(1 + _PROBE_STEPS, workload.max_output_len)
    prompts = tuple(map(tuple, workload.requests[:size]))
    times: list[float] = []
    for count in (1, num_steps):
        probe = dataclasses.replace(
            workload,
            prompts=prompts,
            num_samples=1,
            output_lengths=(count,) * len(prompts),
            num_rows=len(prompts),
        )
        peer.generate(probe)  # compiles
        start = time.perf_counter()
        peer.generate(probe)
        times.append(time.perf_counter() - start)
    peer.close()
    step_s = (times[1] - times[0]) / (num_steps - 1)
    return sum(times[0] + (max(lengths) - 1) * step_s for _, lengths in batches(workload, size))


def measure_workload(
    model: Qwen3,
    bench_model: BenchModel,
    workload: Workload,
    ceilings: Ceilings,
    num_pairs: int,
    *,
    is_alone: bool,
) -> WorkloadResult:
    """Both engines on one workload.

    Args:
        model: Tunix's, whose weights both have.
        bench_model: Its shape.
        workload: What they are asked.
        ceilings: The machine's, for reading what a decode step of the workload reads.
        num_pairs: Runs of each.
        is_alone: Only our engine runs.
    """
    limit = limit_by_part(useful_work(bench_model.config, workload), ceilings)
    print(
        f"{bench_model.name}, {workload.name}: {workload.useful_tokens} tokens, "
        f"limit {sum(limit.values()):.2f} s",
        flush=True,
    )
    ours = SglJaxPeer(model, workload)
    ours.start(workload)
    print(f"  {OURS}: {timed(ours, workload):.2f} s", flush=True)
    results: list[PeerResult] = []

    def measure(batch_size: int | None) -> None:
        peer = VanillaPeer(model, bench_model.config, workload, batch_size)
        results.append(measure_peer(ours, peer, workload, num_pairs))
        peer.close()

    if not is_alone:
        measure(None)
        micro = best_micro_batch(model, bench_model.config, workload, results[0].median_s)
        if micro is not None:
            measure(micro)
    own = summarize_ours(ours, workload, results, num_pairs)
    ours.close()
    return WorkloadResult(
        workload=workload.name,
        num_requests=len(workload.output_lengths),
        num_rows=workload.num_rows,
        useful_tokens=workload.useful_tokens,
        read_bytes_per_s=ceilings.read_bytes_per_s,
        step_bytes=decode_step_bytes(bench_model.config, workload),
        limit_by_part_s=limit,
        peers=[own, *results],
    )


def compare_model(args: argparse.Namespace, name: str) -> None:
    """Measures one model and writes its results."""
    bench_model = MODELS[name]
    config, num_pairs = bench_model.config, args.pairs
    print(f"{name}: {bench_model.in_words}", flush=True)
    seconds = 0.02 if args.quick else 0.5
    ceilings = measure_ceilings(weight_bytes(config), seconds=seconds)
    print(f"  {ceilings.in_words()}", flush=True)
    model = make_tunix_model(config)
    workloads = [
        make_workload(workload, config.vocab_size, is_quick=args.quick)
        for workload in args.workloads
    ]
    results: list[WorkloadResult] = []
    syncs: list[WeightSync] = []
    for workload in workloads:
        reading = ceilings.reading(decode_step_bytes(config, workload), seconds=seconds)
        is_alone = workload.name in args.alone
        result = measure_workload(
            model, bench_model, workload, reading, num_pairs, is_alone=is_alone
        )
        results.append(result)
        # A run that is cut short leaves what it has.
        _write(args, bench_model, ceilings, results, syncs)
    if not args.skip_sync:
        workload = sync_workload(config.vocab_size, is_quick=args.quick)
        syncs = measure_weight_sync(model, workload, repeats=num_pairs)
    _write(args, bench_model, ceilings, results, syncs)


def _write(
    args: argparse.Namespace,
    bench_model: BenchModel,
    ceilings: Ceilings,
    results: list[WorkloadResult],
    syncs: list[WeightSync],
) -> None:
    num_left = len(args.workloads) - len(results)
    command = shlex.join(["benchmarks/throughput/compare.py", *args.command])
    write_results(
        output_dir(args) / f"bench_{bench_model.name}.md",
        f"Rollout speed, model `{bench_model.name}`",
        command,
        [*format_comparison(results), *(format_weight_sync(syncs) if syncs else [])],
        {
            "command": command,
            "is_quick": args.quick,
            "model": dataclasses.asdict(bench_model),
            "ceilings": dataclasses.asdict(ceilings),
            "workloads": [result.to_dict() for result in results],
            "weight_sync": [dataclasses.asdict(sync) for sync in syncs],
        },
        facts=[
            f"Model: {bench_model.in_words}, float32, random weights",
            f"Ceilings measured in this run: {ceilings.in_words()}",
            f"{args.pairs} pairs of runs" + (", quick sizes: no result" * args.quick),
            *([f"CUT SHORT: {num_left} workload(s) missing"] if num_left else []),
        ],
    )


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the options; `command` keeps them for the reports."""
    parser = make_parser(__doc__, pairs=5)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=DEFAULT_MODELS)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument(
        "--alone", nargs="+", choices=WORKLOADS, default=(), help="workloads for our engine only"
    )
    parser.add_argument("--skip-sync", action="store_true", help="leave weight sync out")
    args = parser.parse_args(argv)
    if args.pairs < 1:
        parser.error(f"--pairs must be at least 1, got {args.pairs}")
    if not set(args.alone) <= set(args.workloads):
        parser.error(f"--alone must name some of --workloads, got {args.alone}")
    if args.quick:
        args.models, args.pairs = args.models if "--models" in argv else ["tiny"], 1
    args.command = list(argv)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measures all models."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Tunix uses old names of JAX and Flax.
        for name in args.models:
            compare_model(args, name)


if __name__ == "__main__":
    main()
