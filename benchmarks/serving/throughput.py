"""What HTTP costs: streams of a server against `Engine.generate` in process, on the same engine.

    python benchmarks/serving/throughput.py                 # small, some minutes
    python benchmarks/serving/throughput.py --quick --pairs 1

The requests of `rl_longtail` are answered in turns by `Engine.generate`, by its streams in process,
and by streams over HTTP to a client in another process of the same machine (`client.py`), each on a
connection of its own. The order within a turn rotates; the prefix cache is emptied before each run.
Reported: tokens/s, as a ratio turn by turn, and the time to the first token that the caller sees.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.reporting import make_parser, output_dir, write_results
from benchmarks.lib.shapes import MODELS
from benchmarks.lib.turns import speed_table
from benchmarks.lib.workloads import Workload, make_workload
from sgljax_engine import Engine

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
    args = make_parser(__doc__, pairs=5).parse_args()
    model = MODELS[MODEL]
    workload = make_workload(WORKLOAD, model.config.vocab_size, is_quick=args.quick)
    bodies = bodies_of(workload)
    seconds: dict[str, list[float]] = {}
    firsts: dict[str, list[float]] = {}
    with Engine(
        model_config=model.config,
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
    lines = [*speed_table({WORKLOAD: seconds}, "generate"), ""]
    for name in names[1:]:
        median, last = (1e3 * np.percentile(firsts[name], q) for q in (50, 99))
        lines.append(f"- First token of a {name}: {median:.0f} ms; the 99th percentile {last:.0f}")
    write_results(
        output_dir(args) / "serving.md",
        "What HTTP costs",
        "benchmarks/serving/throughput.py",
        lines,
        {"seconds": seconds, "firsts_s": firsts},
        facts=[f"Model: {model.in_words}, float32; `{WORKLOAD}`, {len(bodies)} requests"],
    )


if __name__ == "__main__":
    main()
