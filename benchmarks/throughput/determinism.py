"""What `enable_deterministic_sampling` costs: throughput with it over throughput without.

    python benchmarks/throughput/determinism.py                  # small, about ten minutes
    python benchmarks/throughput/determinism.py --pairs 1 --quick

Two engines with the same weights answer the same requests in turns in one process, at temperature 1
without filters; the order within a pair alternates. The prefix cache is emptied before each run.
The samples of `rl_longtail` are then scored by each engine's `score`, completions only.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np

from benchmarks.lib.reporting import ROOT, report_head, write_report
from sgljax_engine import Engine, ModelConfig, SamplingParams
from tunix_sgljax.bench.environment import describe_environment
from tunix_sgljax.bench.shapes import MODELS
from tunix_sgljax.bench.workloads import Workload, make_workload

MODEL = "small"
WORKLOADS = ("rl_longtail", "rl_uniform", "long_prompt", "single_stream")
SCORED = "rl_longtail"
MODES = {"default": False, "deterministic": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
    """Seconds of the runs of one thing, by mode, in pairs."""

    name: str
    default_s: list[float]
    deterministic_s: list[float]

    @property
    def ratios(self) -> list[float]:
        """Speed of deterministic mode over that of the default, pair by pair."""
        return [a / b for a, b in zip(self.default_s, self.deterministic_s, strict=True)]

    def row(self) -> str:
        """A line of the table."""
        medians = (np.median(runs) for runs in (self.default_s, self.deterministic_s))
        ratios = self.ratios
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        middle = " | ".join(f"{seconds:.2f}" for seconds in medians)
        return f"| {self.name} | {middle} | {np.median(ratios):.3f} | {spread} | {len(ratios)} |"


def measure_pairs(name: str, runs: Mapping[str, Callable[[], object]], num_pairs: int) -> Pairs:
    """Times both modes in turns, after an untimed run of each."""
    seconds: dict[str, list[float]] = {mode: [] for mode in runs}
    for pair in range(-1, num_pairs):
        for mode in list(runs)[:: 1 if pair % 2 else -1]:
            start = time.perf_counter()
            runs[mode]()
            if pair >= 0:
                seconds[mode].append(time.perf_counter() - start)
    pairs = Pairs(name=name, default_s=seconds["default"], deterministic_s=seconds["deterministic"])
    print(pairs.row(), flush=True)
    return pairs


def measure_workload(model: ModelConfig, workload: Workload, num_pairs: int) -> list[Pairs]:
    """Generation, and for one workload scoring too."""
    requests, lengths = workload.requests, workload.output_lengths
    params = [
        SamplingParams(temperature=1.0, max_new_tokens=int(length), ignore_eos=True)
        for length in lengths
    ]
    engines = {
        mode: Engine(
            model_config=model,
            load_format="dummy",
            max_model_len=workload.max_model_len,
            max_running_requests=workload.num_rows,
            enable_deterministic_sampling=is_deterministic,
        )
        for mode, is_deterministic in MODES.items()
    }

    def generate(engine: Engine) -> list[list[int]]:
        engine.flush_cache()
        return [output.output_ids for output in engine.generate_requests(requests, params)]

    results = [
        measure_pairs(
            workload.name,
            {mode: lambda e=engine: generate(e) for mode, engine in engines.items()},
            num_pairs,
        )
    ]
    if workload.name == SCORED:
        outputs = generate(engines["default"])
        sequences = [[*ids, *out] for ids, out in zip(requests, outputs, strict=True)]
        starts = [len(ids) for ids in requests]
        scores = {
            mode: lambda e=engine: e.score(sequences, 1.0, starts)
            for mode, engine in engines.items()
        }
        results.append(measure_pairs(f"`score` of {workload.name}", scores, num_pairs))
    for engine in engines.values():
        engine.shutdown()
    return results


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description="The cost of deterministic sampling.")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--quick", action="store_true", help="tiny workloads, for a smoke test")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/determinism.md")
    args = parser.parse_args()
    bench_model = MODELS[MODEL]
    results = [
        pairs
        for name in args.workloads
        for pairs in measure_workload(
            bench_model.config,
            make_workload(name, bench_model.config.vocab_size, is_quick=args.quick),
            args.pairs,
        )
    ]
    environment = describe_environment(jax.devices()[0].device_kind)
    lines = [
        *report_head(
            "What deterministic sampling costs",
            "benchmarks/throughput/determinism.py",
            environment,
            f"Model: {bench_model.in_words}, float32",
        ),
        "| workload | default, s | deterministic, s | speed, median pair | smallest to largest "
        "| pairs |",
        "|---|---:|---:|---:|---|---:|",
        *(pairs.row() for pairs in results),
    ]
    content = {"results": [{**dataclasses.asdict(r), "ratios": r.ratios} for r in results]}
    write_report(args.output, lines, environment, content)


if __name__ == "__main__":
    main()
