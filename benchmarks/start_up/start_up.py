"""Start-up and weight sync: cold and warm start, time to first token, one update of the weights.

    python benchmarks/start_up/start_up.py

Every start is a process of its own, on the default configuration with 64 running requests and
random weights: a cold one with an empty compilation cache, then a second one with what the first
left there; rounds repeat this with new folders, and medians are reported. A start is timed from
`Engine(...)` to the end of `warmup()`; the imports before it are reported beside it, as is the
time to first token of one request (64 prompt tokens) right after.

Weight sync is measured in the last process: `update_weights` from device arrays, in turns with one
pass over the same bytes (read and written into memory that is warm). Nothing decodes while the
engine thread updates, so an update's time is also what decoding stalls.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.lib.reporting import ROOT, report_head, write_report
from sgljax_engine import Engine, logical_rules
from sgljax_engine.models.registry import get_model
from tunix_sgljax.bench.environment import Environment, describe_environment
from tunix_sgljax.bench.shapes import SMALL, SMALL_IN_WORDS

NUM_ROWS, NUM_PROMPT = 64, 64
IMPORT = """
import time
started = time.perf_counter()
import jax
from sgljax_engine import Engine
print(time.perf_counter() - started)
"""
PARTS = ("import_s", "construct_s", "warmup_s", "start_s", "first_token_s")


def start_once(cache: str, num_updates: int) -> dict[str, Any]:
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
    memory = engine.get_internal_state().memory
    result = {
        "device": jax.devices()[0].device_kind,
        "construct_s": constructed - started,
        "warmup_s": warm - constructed,
        "start_s": warm - started,
        "first_token_s": out["meta_info"]["time_to_first_token"],
        "num_programs": num_programs,
        "weights_bytes": memory.weights_bytes,
        "kv_bytes": memory.kv_bytes,
        "kv_rule": memory.rule,
    }
    if num_updates:
        result["weight_sync"] = measure_sync(engine, num_updates)
    engine.shutdown()
    return result


def measure_sync(engine: Engine, num_updates: int) -> dict[str, list[float]]:
    """Times updates in turns with plain copies of as many bytes."""
    specs = get_model(SMALL.architecture).param_specs(SMALL)
    source = {name: jnp.full(spec.shape, 0.01) for name, spec in specs.items()}
    rules = logical_rules(SMALL)  # the orientation that trainers have
    arrays = [np.asarray(array) for array in source.values()]
    warm = [np.ones_like(array) for array in arrays]

    def copy_into_warm() -> None:
        for target, array in zip(warm, arrays, strict=True):
            np.copyto(target, array)

    turns: dict[str, Callable[[], Any]] = {
        "update_s": lambda: engine.update_weights(source, rules),
        "copy_s": copy_into_warm,
    }
    times: dict[str, list[float]] = {name: [] for name in turns}
    for index in range(num_updates + 2):
        for name, run in turns.items():
            started = time.perf_counter()
            run()
            if index >= 2:  # the first ones compile and touch memory
                times[name].append(time.perf_counter() - started)
    return times


def run_child(cache: str, num_updates: int) -> dict[str, Any]:
    """`start_once` in a new process, and the imports in another."""
    child = _last_line(__file__, "--child", cache, "--updates", str(num_updates))
    return {"import_s": float(_last_line("-c", IMPORT)), **json.loads(child)}


def _last_line(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()[-1]


def report(
    starts: dict[str, list[dict[str, Any]]],
    sync: dict[str, list[float]],
    environment: Environment,
) -> list[str]:
    """Returns the lines of the results in Markdown."""
    middle = {
        kind: {part: statistics.median(run[part] for run in runs) for part in PARTS}
        for kind, runs in starts.items()
    }
    cold, warm = middle["cold"], middle["warm"]
    some = starts["cold"][0]
    weights_mb, kv_mb = some["weights_bytes"] / 1e6, some["kv_bytes"] / 1e6
    update, copy = (statistics.median(sync[name]) for name in ("update_s", "copy_s"))
    rows = [
        f"| {part.removesuffix('_s').replace('_', ' ')} | {cold[part]:.2f} | {warm[part]:.2f} "
        f"| {100 * warm[part] / cold[part]:.0f} % |"
        for part in PARTS
    ]
    return [
        *report_head(
            "Start-up and weight sync",
            "benchmarks/start_up/start_up.py",
            environment,
            f"Model: {SMALL_IN_WORDS}, float32, random weights",
            f"max_running_requests {NUM_ROWS}, else the defaults; {some['num_programs']} programs; "
            f"weights {weights_mb:.0f} MB, KV cache {kv_mb:.0f} MB ({some['kv_rule']})",
            f"Medians of {len(starts['cold'])} rounds; start = construct + warmup",
        ),
        "| seconds | cold | warm compilation cache | warm over cold |",
        "|---|---:|---:|---:|",
        *rows,
        "",
        f"| weight sync, {weights_mb:.0f} MB | ms | over the copy |",
        "|---|---:|---:|",
        f"| one pass over the bytes | {1e3 * copy:.1f} | 1 |",
        f"| update_weights, and the stall of decoding | {1e3 * update:.1f} | {update / copy:.1f} |",
    ]


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description="Start-up and weight sync.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=9)
    parser.add_argument("--child", metavar="CACHE", help="start once, with this cache")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/start_up.md")
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(start_once(args.child, args.updates)))
        return
    starts: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    for index in range(args.rounds):
        with tempfile.TemporaryDirectory() as cache:
            is_last = index == args.rounds - 1
            starts["cold"].append(run_child(cache, 0))
            starts["warm"].append(run_child(cache, args.updates if is_last else 0))
        print(f"round {index + 1} of {args.rounds}", flush=True)
    sync = starts["warm"][-1].pop("weight_sync")
    environment = describe_environment(starts["cold"][0]["device"])
    content = {"starts": starts, "weight_sync": sync}
    write_report(args.output, report(starts, sync, environment), environment, content)


if __name__ == "__main__":
    main()
