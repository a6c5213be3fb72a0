"""Start-up: cold and warm start, and the time to the first token.

    python benchmarks/start_up/start_up.py

Every start is a process of its own, on the default configuration with 64 running requests and
random weights: a cold one with an empty compilation cache, then a second one with what the first
left there; rounds repeat this with new folders, and medians are reported. A start is timed from
`Engine(...)` to the end of `warmup()`, imports left out; the time to first token is that of one
request (64 prompt tokens) right after.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np

from benchmarks.lib.reporting import make_parser, output_dir, write_results
from sgljax_engine import Engine
from tunix_sgljax.bench.shapes import SMALL, SMALL_IN_WORDS

NUM_ROWS, NUM_PROMPT = 64, 64
PARTS = ("construct_s", "warmup_s", "start_s", "first_token_s")


def start_once(cache: str) -> dict[str, Any]:
    """Starts an engine in this process and returns what it took."""
    started = time.perf_counter()
    engine = Engine(
        model_config=SMALL,
        load_format="dummy",
        max_running_requests=NUM_ROWS,
        compilation_cache_dir=cache,
    )
    constructed = time.perf_counter()
    num_programs = engine.warmup()
    warm = time.perf_counter()
    prompt = np.random.default_rng(0).integers(0, SMALL.vocab_size, NUM_PROMPT).tolist()
    out = engine.generate(None, {"max_new_tokens": 1}, prompt)
    result = {
        "device": jax.devices()[0].device_kind,
        "construct_s": constructed - started,
        "warmup_s": warm - constructed,
        "start_s": warm - started,
        "first_token_s": out["meta_info"]["time_to_first_token"],
        "num_programs": num_programs,
    }
    engine.shutdown()
    return result


def run_child(cache: str) -> dict[str, Any]:
    """`start_once` in a new process."""
    command = [sys.executable, __file__, "--child", cache]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(starts: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Medians of the rounds."""
    cold, warm = (
        {part: statistics.median(run[part] for run in starts[kind]) for part in PARTS}
        for kind in ("cold", "warm")
    )
    return [
        "| seconds | cold | warm compilation cache | warm over cold |",
        "|---|---:|---:|---:|",
        *(
            f"| {part.removesuffix('_s').replace('_', ' ')} | {cold[part]:.2f} | {warm[part]:.2f} "
            f"| {warm[part] / cold[part]:.0%} |"
            for part in PARTS
        ),
    ]


def main() -> None:
    """Measures and writes the results."""
    parser = make_parser(__doc__, pairs=3)
    parser.add_argument("--child", metavar="CACHE", help="start once, with this cache")
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(start_once(args.child)))
        return
    starts: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    for _ in range(1 if args.quick else args.pairs):
        with tempfile.TemporaryDirectory() as cache:
            for kind in starts:
                starts[kind].append(run_child(cache))
                print(f"{kind}: {starts[kind][-1]['start_s']:.2f} s", flush=True)
    some = starts["cold"][0]
    write_results(
        output_dir(args) / "start_up.md",
        "Start-up",
        "benchmarks/start_up/start_up.py",
        table(starts),
        {"starts": starts},
        facts=[
            f"Model: {SMALL_IN_WORDS}, float32, random weights",
            f"max_running_requests {NUM_ROWS}, else the defaults; {some['num_programs']} programs",
            f"Medians of {len(starts['cold'])} rounds; start = construct + warmup",
        ],
        device=some["device"],
    )


if __name__ == "__main__":
    main()
