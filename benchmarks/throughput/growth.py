"""How decode speed grows with the batch, the context, the vocabulary and the waiting requests.

    python benchmarks/throughput/growth.py            # tiny and small, about 20 minutes on 2 cores
    python benchmarks/throughput/growth.py --quick    # a smoke test

Every point is a running engine: requests whose prompts are in the prefix cache already, so that
what is timed is decode and the host's work around it. Medians of `--repeats` runs. One size varies,
the others stay: 8 rows, 64 tokens of prompt, the model's own vocabulary, as many requests as rows,
64 tokens each. Where waiting requests vary, eight times as many as rows are served, and those that
wait stand behind them until the last one is.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from benchmarks.lib import plots
from benchmarks.lib.reporting import ROOT, report_head, write_report
from sgljax_engine import Engine, ModelConfig, SamplingParams
from tunix_sgljax.bench.environment import describe_environment
from tunix_sgljax.bench.shapes import MODELS

NUM_ROWS, PROMPT_LEN, OUTPUT_LEN, NUM_WAVES = 8, 64, 64, 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """Decode speed at one size, median of runs."""

    size: int
    tokens_per_s: float
    runs_s: list[float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """One size varied, for some models; `points` by the model's name."""

    name: str
    title: str
    size_name: str
    sizes: tuple[int, ...]
    models: tuple[str, ...]
    points: dict[str, list[Point]]


def _series(name: str, title: str, size_name: str, sizes: Sequence[int], *models: str) -> Series:
    return Series(
        name=name,
        title=title,
        size_name=size_name,
        sizes=tuple(sizes),
        models=models,
        points={},
    )


FULL = (
    _series(
        "batch",
        "Tokens a second against the batch size",
        "rows",
        [2**i for i in range(9)],
        "tiny",
        "small",
    ),
    _series(
        "context",
        "Tokens a second against the context length",
        "tokens of context, 8 rows",
        [2**i for i in range(6, 13)],
        "tiny",
        "small",
    ),
    _series(
        "vocabulary",
        "Tokens a second against the vocabulary",
        "tokens in the vocabulary, 8 rows",
        [1024, 4096, 16384, 65536, 151936],
        "tiny",
        "small",
    ),
    _series(
        "waiting",
        "Tokens a second against the requests that wait",
        "waiting requests, 8 rows",
        [1, 10, 100, 1000, 10_000],
        "tiny",
        "small",
    ),
)
QUICK = tuple(
    dataclasses.replace(series, sizes=series.sizes[:2], models=("tiny",)) for series in FULL
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Load:
    """What is run at one point: requests that are served, and others that wait behind them."""

    size: int
    config: ModelConfig
    num_rows: int = NUM_ROWS
    context: int = PROMPT_LEN
    num_waves: int = 1
    num_waiting: int = 0

    @property
    def num_served(self) -> int:
        """Requests whose tokens count."""
        return self.num_rows * self.num_waves


def _loads(series: Series, model: str) -> Iterator[_Load]:
    config = MODELS[model].config
    for size in series.sizes:
        if series.name == "batch":
            yield _Load(size=size, config=config, num_rows=size)
        elif series.name == "context":
            yield _Load(size=size, config=config, context=size)
        elif series.name == "waiting":
            yield _Load(size=size, config=config, num_waves=NUM_WAVES, num_waiting=size)
        else:
            config = dataclasses.replace(config, vocab_size=size)
            yield _Load(size=size, config=config)


def measure_point(load: _Load, repeats: int) -> Point:
    """Builds an engine and times runs of it."""
    prompt = np.random.default_rng(0).integers(1, load.config.vocab_size, load.context).tolist()
    engine = Engine(
        model_config=load.config,
        load_format="dummy",
        max_running_requests=load.num_rows,
        max_model_len=load.context + OUTPUT_LEN,
    )
    with engine:
        _serve_s(engine, prompt, load)  # compiles, and leaves the prompt in the prefix cache
        runs_s = [_serve_s(engine, prompt, load) for _ in range(repeats)]
    speed = load.num_served * OUTPUT_LEN / float(np.median(runs_s))
    return Point(size=load.size, tokens_per_s=speed, runs_s=runs_s)


def _serve_s(engine: Engine, prompt: list[int], load: _Load) -> float:
    """Seconds until the served requests have ended; those behind them are aborted then.

    Nothing runs until all of them are in the engine's queue, in this order.
    """
    params = SamplingParams(max_new_tokens=OUTPUT_LEN, ignore_eos=True)
    engine.pause_generation()
    num_queued = 0
    calls = []
    with ThreadPoolExecutor(2) as pool:
        for count in filter(None, (load.num_served, load.num_waiting)):
            calls.append(pool.submit(engine.generate_requests, [prompt] * count, params))
            num_queued += count
            while engine.get_internal_state().waiting_queue_size < num_queued:
                time.sleep(0.01)
        served, *waiting = calls
        start = time.perf_counter()
        engine.continue_generation()
        served.result()
        seconds = time.perf_counter() - start
        engine.abort_request(abort_all=True)
        for call in waiting:
            call.result()
    return seconds


def measure_series(series: Series, repeats: int) -> Series:
    """All points of a series."""
    points: dict[str, list[Point]] = {}
    for model in series.models:
        points[model] = []
        for load in _loads(series, model):
            point = measure_point(load, repeats)
            points[model].append(point)
            print(f"{model}, {series.name} {load.size}: {point.tokens_per_s:.0f} tokens/s")
    return dataclasses.replace(series, points=points)


def _table(series: Series) -> list[str]:
    lines = [
        f"## {series.title}",
        "",
        f"| {series.size_name} | {' | '.join(f'{model}, tokens/s' for model in series.points)} |",
        f"|---:|{'---:|' * len(series.points)}",
    ]
    for index, size in enumerate(series.sizes):
        speeds = [f"{points[index].tokens_per_s:.0f}" for points in series.points.values()]
        lines.append(f"| {size} | {' | '.join(speeds)} |")
    return [*lines, ""]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures all series and draws them."""
    parser = argparse.ArgumentParser(description="Growth of decode speed.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--series", nargs="+", choices=[series.name for series in FULL])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output-dir", type=Path, help="instead of benchmarks/results")
    args = parser.parse_args(argv)
    folder = args.output_dir or ROOT / (
        "outputs/bench_quick" if args.quick else "benchmarks/results"
    )
    chosen = [
        series
        for series in (QUICK if args.quick else FULL)
        if args.series is None or series.name in args.series
    ]
    measured = [measure_series(series, 1 if args.quick else args.repeats) for series in chosen]
    environment = describe_environment(jax.devices()[0].device_kind)
    lines = [
        *report_head("Growth of decode speed", "benchmarks/throughput/growth.py", environment),
        *(line for series in measured for line in _table(series)),
    ]
    content = {"is_quick": args.quick, "series": [dataclasses.asdict(s) for s in measured]}
    write_report(folder / "growth.md", lines, environment, content)
    print(f"wrote {plots.write_page(folder)}")


if __name__ == "__main__":
    main()
