"""What the sampling table costs: decode throughput of 32 rows, by option.

    python benchmarks/throughput/sampling_table.py

All settings sample from the same model in one process, in turns: 32 prompts of 32 tokens, 64 new
tokens each, nothing stops early. The model is `reporting.SMALL` with random weights, whose
distribution is flat: a nucleus of 0.9 holds thousands of tokens, which is the worst case for top-p
alone. Throughput is that of whole `generate` calls, prefill included. On a machine that others use
too, a run's wall time says little and the process's CPU time more, so both are reported.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.lib.reporting import ROOT, report_head, write_report
from sgljax_engine import Engine, SamplingParams
from tunix_sgljax.bench.environment import Environment, describe_environment
from tunix_sgljax.bench.shapes import SMALL, SMALL_IN_WORDS

NUM_ROWS, NUM_PROMPT, NUM_NEW = 32, 32, 64
PENALTIES = {"presence_penalty": 0.2, "frequency_penalty": 0.1, "repetition_penalty": 1.1}
EDITS = {"logit_bias": dict.fromkeys(range(32), 0.5), "bad_token_ids": tuple(range(32, 64))}
FILTERS = {"top_k": 50, "top_p": 0.95, "min_p": 0.01}
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_k=50": {"top_k": 50},
    "top_p=0.9": {"top_p": 0.9},
    "min_p=0.1": {"min_p": 0.1},
    "top_k, top_p, min_p": FILTERS,
    "penalties": PENALTIES,
    "logit_bias, bad_token_ids": EDITS,
    "all": {**FILTERS, **PENALTIES, **EDITS, "min_new_tokens": NUM_NEW, "stop_token_ids": (1, 2)},
}
"""Beside a temperature of 0.8; the first is what the others are compared with."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Runs of one setting.

    Attributes:
        vocab_size: Of the model.
        name: The setting.
        wall_s: Seconds of each run, without the first, which compiles.
        cpu_s: CPU seconds of each, of all threads.
    """

    vocab_size: int
    name: str
    wall_s: list[float]
    cpu_s: list[float]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second in the fastest run."""
        return NUM_ROWS * NUM_NEW / min(self.wall_s)

    def costs(self, plain: Result) -> tuple[float, float]:
        """Percent of throughput lost against plain sampling: fastest runs, median CPU times."""
        by_wall = 1.0 - min(plain.wall_s) / min(self.wall_s)
        by_cpu = 1.0 - float(np.median(plain.cpu_s) / np.median(self.cpu_s))
        return 100 * by_wall, 100 * by_cpu


def make_engine(vocab_size: int) -> Engine:
    """Returns an engine with the long-tail benchmark's model and another vocabulary."""
    model = dataclasses.replace(SMALL, vocab_size=vocab_size, context_length=NUM_PROMPT + NUM_NEW)
    return Engine(
        model_config=model,
        load_format="dummy",
        max_running_requests=NUM_ROWS,
        batch_buckets=(NUM_ROWS,),
        num_kv_tokens=2 * NUM_ROWS * (NUM_PROMPT + NUM_NEW),
        disable_radix_cache=True,
        random_seed=0,
    )


def measure(vocab_size: int, repeats: int) -> list[Result]:
    """Runs all settings in turns on one engine; each round in another order."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(64, vocab_size, (NUM_ROWS, NUM_PROMPT)).tolist()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in SETTINGS}
    names = list(SETTINGS)
    with make_engine(vocab_size) as engine:
        for round_index in range(repeats + 1):
            for name in names[round_index % len(names) :] + names[: round_index % len(names)]:
                params = SamplingParams(
                    temperature=0.8, max_new_tokens=NUM_NEW, ignore_eos=True, **SETTINGS[name]
                )
                start, cpu_start = time.perf_counter(), time.process_time()
                outputs = engine.generate_requests(prompts, params)
                seconds = time.perf_counter() - start, time.process_time() - cpu_start
                if any(len(output.output_ids) != NUM_NEW for output in outputs):
                    raise RuntimeError(f"{name}: an output ended early")
                if round_index > 0:
                    times[name].append(seconds)
            print(f"vocabulary {vocab_size}: round {round_index} of {repeats}", flush=True)
    return [
        Result(
            vocab_size=vocab_size,
            name=name,
            wall_s=[wall for wall, _ in times[name]],
            cpu_s=[cpu for _, cpu in times[name]],
        )
        for name in names
    ]


def report(results: list[Result], environment: Environment) -> list[str]:
    """Returns the lines of the results in Markdown."""
    return [
        *report_head(
            "The cost of the sampling table",
            "benchmarks/throughput/sampling_table.py",
            environment,
            f"Model: {SMALL_IN_WORDS}, float32; {NUM_ROWS} rows of {NUM_NEW} new tokens at "
            "temperature 0.8",
            "Cost: throughput lost against plain temperature sampling, by the fastest runs' wall "
            "time and by the median CPU time",
        ),
        "| vocabulary | settings | tokens/s (fastest run) | cost, wall | cost, CPU |",
        "|---:|---|---:|---:|---:|",
        *(_row(result, results) for result in results),
    ]


def _row(result: Result, results: list[Result]) -> str:
    plain = next(r for r in results if r.vocab_size == result.vocab_size)
    wall, cpu = result.costs(plain)
    return (
        f"| {result.vocab_size} | {result.name} | {result.tokens_per_s:.0f} | {wall:.1f} % "
        f"| {cpu:.1f} % |"
    )


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description="The cost of the sampling table.")
    parser.add_argument("--vocabularies", default=f"{SMALL.vocab_size},32768")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks/results/sampling_table.md"
    )
    args = parser.parse_args()
    results: list[Result] = []
    for vocab_size in args.vocabularies.split(","):
        results += measure(int(vocab_size), args.repeats)
    environment = describe_environment(jax.devices()[0].device_kind)
    content = {"results": [dataclasses.asdict(r) for r in results]}
    write_report(args.output, report(results, environment), environment, content)


if __name__ == "__main__":
    main()
