"""How decode speed grows with the batch, the context, the vocabulary and the waiting requests.

    python benchmarks/throughput/growth.py            # tiny and small, about 20 minutes on 2 cores
    python benchmarks/throughput/growth.py --quick    # a smoke test

Every point is a running engine: requests whose prompts are in the prefix cache already, so that
what is timed is decode and the host's work around it. Medians of `--pairs` runs. One size varies,
the others stay: 8 rows, 64 tokens of prompt, the model's own vocabulary, as many requests as rows,
64 tokens each. Where waiting requests vary, eight times as many as rows are served, and those that
wait stand behind them until the last one is.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks.lib.page import write_page
from benchmarks.lib.reporting import make_parser, output_dir, write_results
from benchmarks.lib.shapes import MODELS
from sgljax_engine import Engine, SamplingParams

OUTPUT_LEN = 64
SERIES: dict[str, tuple[str, list[int]]] = {
    "batch": ("rows", [2**i for i in range(9)]),
    "context": ("tokens of context, 8 rows", [2**i for i in range(6, 13)]),
    "vocabulary": ("tokens in the vocabulary, 8 rows", [1024, 4096, 16384, 65536, 151936]),
    "waiting": ("waiting requests, 8 rows", [1, 10, 100, 1000, 10_000]),
}
"""What varies, in words, and its sizes, by the name of the series."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """What is run at one point: requests that are served, and others that wait behind them."""

    num_rows: int = 8
    context: int = 64
    vocab_size: int
    num_waves: int = 1
    num_waiting: int = 0

    @property
    def num_served(self) -> int:
        """Requests whose tokens count."""
        return self.num_rows * self.num_waves


def make_load(series: str, size: int, vocab_size: int) -> Load:
    """A point of a series for a model with such a vocabulary."""
    changes = {
        "batch": {"num_rows": size},
        "context": {"context": size},
        "vocabulary": {"vocab_size": size},
        "waiting": {"num_waves": 8, "num_waiting": size},
    }
    return dataclasses.replace(Load(vocab_size=vocab_size), **changes[series])


def measure_point(model: str, load: Load, repeats: int) -> list[float]:
    """Builds an engine; returns the seconds of its runs."""
    prompt = np.random.default_rng(0).integers(1, load.vocab_size, load.context).tolist()
    with Engine(
        model_config=dataclasses.replace(MODELS[model].config, vocab_size=load.vocab_size),
        load_format="dummy",
        max_running_requests=load.num_rows,
        max_model_len=load.context + OUTPUT_LEN,
    ) as engine:
        _serve_s(engine, prompt, load)  # compiles, and leaves the prompt in the prefix cache
        return [_serve_s(engine, prompt, load) for _ in range(repeats)]


def _serve_s(engine: Engine, prompt: list[int], load: Load) -> float:
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


def main(argv: Sequence[str] | None = None) -> None:
    """Measures all series."""
    parser = make_parser(__doc__, pairs=3)
    parser.add_argument("--series", nargs="+", choices=SERIES, default=list(SERIES))
    args = parser.parse_args(argv)
    models = ("tiny",) if args.quick else ("tiny", "small")
    lines: list[str] = []
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name in args.series:
        in_words, sizes = SERIES[name]
        found[name] = {model: {} for model in models}
        lines += [f"## {name}", "", f"| {in_words} | {', tokens/s | '.join(models)}, tokens/s |"]
        lines += [f"|---:|{'---:|' * len(models)}"]
        for size in sizes[: 2 if args.quick else None]:
            speeds = []
            for model in models:
                load = make_load(name, size, MODELS[model].config.vocab_size)
                runs_s = measure_point(model, load, 1 if args.quick else args.pairs)
                found[name][model][str(size)] = runs_s
                speeds.append(f"{load.num_served * OUTPUT_LEN / np.median(runs_s):.0f}")
            lines.append(f"| {size} | {' | '.join(speeds)} |")
            print(lines[-1], flush=True)
        lines.append("")
    write_results(
        output_dir(args) / "growth.md",
        "Growth of decode speed",
        "benchmarks/throughput/growth.py",
        lines,
        {"is_quick": args.quick, "runs_s": found},
    )
    print(f"wrote {write_page(output_dir(args))}")


if __name__ == "__main__":
    main()
