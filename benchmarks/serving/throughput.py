"""What HTTP costs: streams of a server against `Engine.generate` in process, on the same engine.

    python benchmarks/serving/throughput.py                 # small, some minutes
    python benchmarks/serving/throughput.py --quick --pairs 1

The requests of `rl_longtail` are answered in turns by `Engine.generate`, by its streams in process,
and by streams over HTTP to a client in another process of the same machine (`client.py`), each on a
connection of its own. The order within a turn rotates; the prefix cache is emptied before each run.
Reported: tokens/s, as a ratio turn by turn, and the time to the first token that the caller sees.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.lib.reporting import ROOT, report_head, write_report
from sgljax_engine import Engine
from tunix_sgljax.bench.environment import describe_environment
from tunix_sgljax.bench.shapes import MODELS
from tunix_sgljax.bench.workloads import Workload, make_workload

MODEL = "small"
WORKLOAD = "rl_longtail"
CLIENT = Path(__file__).with_name("client.py")

Run = Callable[[], tuple[float, list[float]]]
"""Runs all requests; returns the seconds, and the seconds to each first token."""


def bodies_of(workload: Workload) -> list[dict[str, Any]]:
    """Requests as bodies of `/generate`."""
    return [
        {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": count, "ignore_eos": True, "seed": index},
        }
        for index, (ids, count) in enumerate(
            zip(workload.requests, workload.output_lengths, strict=True)
        )
    ]


def in_process(engine: Engine, bodies: list[dict[str, Any]], *, stream: bool) -> Run:
    """A run through `Engine.generate`."""
    ids = [body["input_ids"] for body in bodies]
    params = [body["sampling_params"] for body in bodies]

    def run() -> tuple[float, list[float]]:
        engine.flush_cache()
        start_s = time.perf_counter()
        if not stream:
            engine.generate(input_ids=ids, sampling_params=params)
            return time.perf_counter() - start_s, []
        firsts: dict[int, float] = {}
        for piece in engine.generate(input_ids=ids, sampling_params=params, stream=True):
            firsts.setdefault(piece["index"], time.perf_counter() - start_s)
        return time.perf_counter() - start_s, list(firsts.values())

    return run


def over_http(engine: Engine, url: str, bodies: list[dict[str, Any]]) -> Run:
    """A run by the client's process."""
    content = json.dumps(bodies)

    def run() -> tuple[float, list[float]]:
        engine.flush_cache()
        done = subprocess.run(
            [sys.executable, str(CLIENT), url], input=content, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        replies = json.loads(done.stdout)
        for body, reply in zip(bodies, replies, strict=True):
            assert len(reply["ids"]) == body["sampling_params"]["max_new_tokens"]
        return max(reply["end_s"] for reply in replies), [reply["first_s"] for reply in replies]

    return run


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description="The cost of HTTP.")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tiny workload")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/serving.md")
    args = parser.parse_args()
    bench_model = MODELS[MODEL]
    workload = make_workload(WORKLOAD, bench_model.config.vocab_size, is_quick=args.quick)
    bodies = bodies_of(workload)
    seconds: dict[str, list[float]] = {}
    firsts: dict[str, list[float]] = {}
    with Engine(
        model_config=bench_model.config,
        load_format="dummy",
        max_model_len=workload.max_model_len,
        max_running_requests=workload.num_rows,
    ) as engine:
        server = engine.serve(port=0)
        runs: dict[str, Run] = {
            "generate": in_process(engine, bodies, stream=False),
            "stream in process": in_process(engine, bodies, stream=True),
            "stream over HTTP": over_http(engine, server.url, bodies),
        }
        names = list(runs)
        for turn in range(-1, args.pairs):
            start = turn % len(names)
            for name in names[start:] + names[:start]:
                took_s, first_s = runs[name]()
                if turn >= 0:
                    seconds.setdefault(name, []).append(took_s)
                    firsts.setdefault(name, []).extend(first_s)
                    print(f"{name}: {workload.useful_tokens / took_s:.0f} tokens/s", flush=True)
    environment = describe_environment(jax.devices()[0].device_kind)
    lines = [
        *report_head(
            "What HTTP costs",
            "benchmarks/serving/throughput.py",
            environment,
            f"Model: {bench_model.in_words}, float32; `{WORKLOAD}`, {len(bodies)} requests",
        ),
        "| | tokens/s, median | of `generate`, median turn | smallest to largest "
        "| first token, ms: p50 | p99 |",
        "|---|---:|---:|---|---:|---:|",
    ]
    for name in names:
        speed = workload.useful_tokens / float(np.median(seconds[name]))
        ratios = np.array(seconds["generate"]) / np.array(seconds[name])
        times = [
            f"{1e3 * np.percentile(firsts[name], q):.0f}" if firsts[name] else "" for q in (50, 99)
        ]
        lines.append(
            f"| {name} | {speed:.0f} | {np.median(ratios):.3f} | {ratios.min():.3f} to "
            f"{ratios.max():.3f} | {times[0]} | {times[1]} |"
        )
    write_report(args.output, lines, environment, {"seconds": seconds, "firsts_s": firsts})


if __name__ == "__main__":
    main()
