"""What watching costs: throughput while something watches over throughput while nothing does.

    python benchmarks/throughput/observability.py                # a few minutes
    python benchmarks/throughput/observability.py --pairs 1

An engine answers the same requests again and again, in pairs of runs, with and without; the order
within a pair alternates. The prefix cache is emptied before each run. The tiny model, one token a
dispatch, is the worst case: its dispatches are as short as they get. CPU time, of all threads of
the process, says more than seconds where other processes compete.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from benchmarks.lib.reporting import ROOT, report_head, write_report
from sgljax_engine import Engine, ModelConfig, SamplingParams
from sgljax_engine.observability.trace import Recorder
from tunix_sgljax.bench.environment import describe_environment
from tunix_sgljax.bench.shapes import SMALL, SMALL_IN_WORDS
from tunix_sgljax.observability.progress import Progress

NUM_REQUESTS = 16


class Case(NamedTuple):
    """A model, and how it decodes."""

    name: str
    model: ModelConfig
    in_words: str
    decode_steps: int
    num_tokens: int


CASES = (
    Case("small", SMALL, f"{SMALL_IN_WORDS}, float32, 8 tokens a dispatch", 8, 32),
    Case(
        "tiny",
        dataclasses.replace(SMALL, num_layers=1, hidden_size=64, intermediate_size=128),
        "1 layer, hidden 64, 1 token a dispatch",
        1,
        64,
    ),
)


class Terminal(io.StringIO):
    """Takes what is drawn as a terminal would."""

    def isatty(self) -> bool:
        """Says that it is one."""
        return True


@contextlib.contextmanager
def drawing(engine: Engine, num_requests: int) -> Iterator[None]:
    """A progress bar, five times a second."""
    with contextlib.redirect_stderr(Terminal()), Progress(True).rollout(engine, num_requests):
        yield


@contextlib.contextmanager
def recording(engine: Engine, num_requests: int) -> Iterator[None]:
    """A recording for a timeline."""
    del num_requests
    engine.start_recording()
    try:
        yield
    finally:
        engine.stop_recording()


@contextlib.contextmanager
def asking(engine: Engine, num_requests: int) -> Iterator[None]:
    """What `log_rollout_metrics` does once a step."""
    del num_requests
    yield
    engine.get_internal_state()


WATCHERS: dict[str, Callable[[Engine, int], contextlib.AbstractContextManager[None]]] = {
    "progress bar": drawing,
    "recording a timeline": recording,
    "metrics of a step": asking,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
    """Runs with and without a watcher, pair by pair: seconds, and those of all the CPUs' work."""

    name: str
    without_s: list[float]
    with_s: list[float]
    without_cpu_s: list[float]
    with_cpu_s: list[float]

    def row(self) -> str:
        """A line of the table."""
        ratios = [a / b for a, b in zip(self.without_s, self.with_s, strict=True)]
        works = [a / b for a, b in zip(self.with_cpu_s, self.without_cpu_s, strict=True)]
        parts = [
            f"{np.median(self.without_s):.2f}",
            *(f"{np.median(r):.3f} ({min(r):.2f} to {max(r):.2f})" for r in (ratios, works)),
        ]
        return f"| {self.name} | {' | '.join(parts)} | {len(ratios)} |"


def measure(name: str, engine: Engine, run: Callable[[], None], num_pairs: int) -> Pairs:
    """Times both in turns."""
    pairs = Pairs(name=name, without_s=[], with_s=[], without_cpu_s=[], with_cpu_s=[])
    for pair in range(num_pairs):
        for is_watched in (False, True)[:: 1 if pair % 2 else -1]:
            engine.flush_cache()
            watcher = WATCHERS[name](engine, NUM_REQUESTS)
            start, cpu_start = time.perf_counter(), time.process_time()
            with watcher if is_watched else contextlib.nullcontext():
                run()
            seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
            (pairs.with_s if is_watched else pairs.without_s).append(seconds)
            (pairs.with_cpu_s if is_watched else pairs.without_cpu_s).append(cpu_s)
    return pairs


def measure_case(case: Case, num_pairs: int) -> list[Pairs]:
    """All watchers over one engine."""
    rng = np.random.default_rng(0)
    vocab_size = case.model.vocab_size
    prompts = [rng.integers(0, vocab_size, 64).tolist() for _ in range(NUM_REQUESTS)]
    params = SamplingParams(temperature=1.0, max_new_tokens=case.num_tokens, ignore_eos=True)
    with Engine(
        model_config=case.model,
        load_format="dummy",
        max_model_len=256,
        max_running_requests=NUM_REQUESTS,
        decode_steps=case.decode_steps,
    ) as engine:

        def run() -> None:
            engine.generate_requests(prompts, params)

        run()
        measured = []
        for name in WATCHERS:
            pairs = measure(name, engine, run, num_pairs)
            measured.append(dataclasses.replace(pairs, name=f"{case.name}: {name}"))
            print(measured[-1].row(), flush=True)
    return measured


def event_ns() -> float:
    """CPU time of noting one event, in ns."""
    recorder, num = Recorder(), 100_000
    recorder.start()
    start = time.thread_time_ns()
    for _ in range(num):
        recorder.slice("engine", "decode", 0.0, 1.0, {"rows": 1})
    return (time.thread_time_ns() - start) / num


def main() -> None:
    """Measures and writes the report."""
    parser = argparse.ArgumentParser(description="The cost of progress, metrics and timelines.")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/observability.md")
    args = parser.parse_args()
    results = [pairs for case in reversed(CASES) for pairs in measure_case(case, args.pairs)]
    environment = describe_environment(jax.devices()[0].device_kind)
    noted_ns = event_ns()
    lines = [
        *report_head(
            "What watching costs",
            "benchmarks/throughput/observability.py",
            environment,
            f"{NUM_REQUESTS} requests of 64 prompt tokens; "
            + "; ".join(
                f"{case.name}: {case.in_words}, {case.num_tokens} output tokens each"
                for case in CASES
            ),
            f"Noting one event takes {noted_ns / 1000:.1f} us of the thread that does it; there "
            "are three or four in a dispatch, and none in a token",
        ),
        "| model: what watches | without, s | speed with it, median pair | CPU time with it, "
        "median pair | pairs |",
        "|---|---:|---:|---:|---:|",
        *(pairs.row() for pairs in results),
    ]
    content = {"results": [dataclasses.asdict(pairs) for pairs in results], "event_ns": noted_ns}
    write_report(args.output, lines, environment, content)


if __name__ == "__main__":
    main()
