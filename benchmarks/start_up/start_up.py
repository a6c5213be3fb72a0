"""Start-up: cold and warm start, and the time to the first token.

    python benchmarks/start_up/start_up.py
    python benchmarks/start_up/start_up.py --model FOLDER    # a real model's

Every start is a process of its own, on the default configuration with 64 running requests, and
random weights unless a folder is given: a cold one with an empty compilation cache, then a second
one with what the first left there; rounds repeat this with new caches, and medians are reported. A
start is timed from `Engine(...)` to the end of `warmup()`, imports left out; the time to first
token is that of one request (64 prompt tokens) right after.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.lib.reporting import make_parser, output_dir, write_results
from benchmarks.lib.shapes import SMALL, SMALL_IN_WORDS
from sgljax_engine import Engine

NUM_ROWS, NUM_PROMPT = 64, 64
REAL: dict[str, Any] = {"max_model_len": 2048, "num_kv_tokens": 32_768}
"""Options with a folder, whose model may take contexts that the memory has no room for."""

PARTS = ("construct_s", "warmup_s", "start_s", "first_token_s")


def start_once(cache: str, model: Path | None) -> dict[str, Any]:
    """Starts an engine in this process and returns what it took."""
    started = time.perf_counter()
    options: dict[str, Any] = (
        {"model_config": SMALL, "load_format": "dummy"} if model is None else REAL
    )
    engine = Engine(
        model,
        **options,
        max_running_requests=NUM_ROWS,
        compilation_cache_dir=cache,
    )
    constructed = time.perf_counter()
    num_programs = engine.warmup()
    warm = time.perf_counter()
    vocab_size = engine.model_config.vocab_size
    prompt = np.random.default_rng(0).integers(0, vocab_size, NUM_PROMPT).tolist()
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


def run_child(cache: str, model: Path | None) -> dict[str, Any]:
    """`start_once` in a new process."""
    command = [sys.executable, __file__, "--child", cache]
    if model is not None:
        command += ["--model", str(model)]
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
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--child", metavar="CACHE", help="start once, with this cache")
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(start_once(args.child, args.model)))
        return
    starts: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    for _ in range(1 if args.quick else args.pairs):
        with tempfile.TemporaryDirectory() as cache:
            for kind in starts:
                starts[kind].append(run_child(cache, args.model))
                print(f"{kind}: {starts[kind][-1]['start_s']:.2f} s", flush=True)
    some, name, options = starts["cold"][0], "start_up", ""
    command = "benchmarks/start_up/start_up.py"
    model = f"{SMALL_IN_WORDS}, float32, random weights"
    if args.model is not None:
        name, model = f"start_up_{args.model.name.lower()}", f"{args.model.name}, its own weights"
        command += f" --model {args.model.name}"
        options = "".join(f", {key} {value}" for key, value in REAL.items())
    write_results(
        output_dir(args) / f"{name}.md",
        "Start-up",
        command,
        table(starts),
        {"starts": starts},
        facts=[
            f"Model: {model}",
            f"max_running_requests {NUM_ROWS}{options}, else the defaults; {some['num_programs']} "
            "programs",
            f"Medians of {len(starts['cold'])} rounds; start = construct + warmup",
        ],
        device=some["device"],
    )


if __name__ == "__main__":
    main()
