"""A group of engines: throughput, host work, balance and compile time, on simulated devices.

    python benchmarks/throughput/group.py

All devices are the cores of this machine, so a group cannot be faster here than one engine. What is
measured is what the group itself costs. Each part runs in a process with as many devices as it
needs:

- throughput: `rl_longtail` on one engine, and on two with half the rows each, in turns. XLA's
  threads are those of the process: the one engine has two cores, the two share them.
- host: 8 engines with 64 rows each decode. The CPU seconds of the engine threads in a dispatch:
  scheduling, building batches, handing arrays to JAX, publishing tokens. Python's lock lets one
  thread run at a time, so their sum is what 8 devices wait for in the worst case. It is compared
  with the seconds of the same dispatch of one engine alone.
- balance: `rl_longtail` on four engines. Busy seconds and tokens of each.
- compile: `warmup` of 1, 2 and 8 engines without a compilation cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks.lib.reporting import ROOT, report_head, write_report
from sgljax_engine import Engine, ModelConfig, SamplingParams
from tunix_sgljax.bench.environment import describe_environment
from tunix_sgljax.bench.shapes import SMALL, SMALL_IN_WORDS
from tunix_sgljax.bench.workloads import Workload, make_workload

ROWS, STEPS, CONTEXT = 64, 16, 128
MAX_HOST_SHARE = MAX_IMBALANCE = 0.10
_MARK = "RESULT "


def make_engine(model: ModelConfig, num_engines: int, num_rows: int, **options: Any) -> Engine:
    """An engine, or a group that has so many rows in all."""
    mesh = Mesh(np.asarray(jax.devices()[:num_engines]), ("data",))
    return Engine(
        model_config=model,
        load_format="dummy",
        mesh=mesh,
        max_running_requests=num_rows,
        compilation_cache_dir=None,
        **options,
    )


def run_workload(engine: Engine, workload: Workload) -> float:
    """Seconds until all requests have their tokens."""
    params = [
        SamplingParams(max_new_tokens=length, ignore_eos=True) for length in workload.output_lengths
    ]
    started = time.perf_counter()
    outputs = engine.generate_requests(workload.requests, params)
    seconds = time.perf_counter() - started
    assert [len(output.output_ids) for output in outputs] == list(workload.output_lengths)
    return seconds


def new_workload(seed: int) -> Workload:
    """`rl_longtail` with prompts that no engine has seen."""
    workload = make_workload("rl_longtail", SMALL.vocab_size)
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(1, SMALL.vocab_size, len(p)).tolist() for p in workload.prompts]
    return dataclasses.replace(workload, prompts=tuple(map(tuple, prompts)))


# -------------------------------------------------------------------- parts


def throughput(repeats: int) -> dict[str, Any]:
    """Tokens a second of one engine and of two, in turns."""
    workload = new_workload(0)
    engines = {count: make_engine(SMALL, count, workload.num_rows) for count in (1, 2)}
    for engine in engines.values():
        engine.warmup()
        run_workload(engine, workload)
    rates: dict[int, list[float]] = {count: [] for count in engines}
    for turn in range(repeats):
        workload = new_workload(turn + 1)
        for count in list(engines)[:: 1 if turn % 2 else -1]:
            rates[count].append(workload.useful_tokens / run_workload(engines[count], workload))
    ratios = [two / one for one, two in zip(rates[1], rates[2], strict=True)]
    return {"one": rates[1], "two": rates[2], "ratios": ratios}


class HostClock:
    """CPU seconds that an engine's thread spends in its steps."""

    def __init__(self, core: Any) -> None:
        """Wraps the steps of an engine that has nothing to do."""
        self.steps: list[tuple[float, float]] = []
        self._step = core.step
        core.step = self._timed

    def _timed(self) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        self._step()
        self.steps.append((time.perf_counter() - wall, time.thread_time() - cpu))


def decode_steps(num_engines: int) -> tuple[float, float]:
    """Median seconds of a dispatch of 64 rows, and CPU seconds that its thread spends on it."""
    engine = make_engine(
        SMALL,
        num_engines,
        ROWS * num_engines,
        num_kv_tokens=num_engines * ROWS * 2 * CONTEXT,
        decode_steps=STEPS,
    )
    engine.warmup()
    clocks = [HostClock(loop._core) for loop in engine._group.loops]
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, SMALL.vocab_size, (ROWS * num_engines, CONTEXT // 2)).tolist()
    params = SamplingParams(max_new_tokens=8 * STEPS, ignore_eos=True)
    outputs = engine.generate_requests(prompts, params)
    assert all(len(output.output_ids) == 8 * STEPS for output in outputs)
    engine.shutdown()
    full = [step for clock in clocks for step in clock.steps[2:-1]]  # not the prefill's
    return tuple(np.median(np.asarray(full), axis=0).tolist())


def host() -> dict[str, Any]:
    """What the threads of 8 engines cost, against a dispatch of one engine alone."""
    wall_one, cpu_one = decode_steps(1)
    wall_all, cpu_all = decode_steps(8)
    return {
        "dispatch_s": wall_one,
        "dispatch_of_8_s": wall_all,
        "host_of_1_s": cpu_one,
        "host_of_8_s": cpu_all,
        "share": cpu_all / wall_one,
        "share_of_all": 8 * cpu_all / wall_one,
    }


def balance(repeats: int) -> dict[str, Any]:
    """Tokens of each of four engines, and how far the most is above the mean."""
    engine = make_engine(SMALL, 4, new_workload(0).num_rows)
    engine.warmup()
    runs = []
    for turn in range(repeats):
        before = tokens_of(engine)
        run_workload(engine, new_workload(turn))
        tokens = [now - then for now, then in zip(tokens_of(engine), before, strict=True)]
        runs.append({"tokens": tokens, "imbalance": max(tokens) / (sum(tokens) / 4) - 1})
    return {"runs": runs}


def tokens_of(engine: Engine) -> list[int]:
    """Output tokens of each engine."""
    engines = engine.get_internal_state().engines
    return [state.counters.num_output_tokens for state in engines]


def compilation(num_engines: int) -> dict[str, Any]:
    """Seconds of `warmup`."""
    engine = make_engine(SMALL, num_engines, 16 * num_engines)
    started = time.perf_counter()
    num_programs = engine.warmup()
    return {"num_programs": num_programs, "seconds": time.perf_counter() - started}


# -------------------------------------------------------------------- the report


def run_part(name: str, num_devices: int, repeats: int) -> dict[str, Any]:
    """Runs a part in a process with so many devices."""
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    command = [sys.executable, __file__, "--part", name, "--repeats", str(repeats)]
    variables = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    print(name, line, flush=True)
    return json.loads(line.removeprefix(_MARK))


def table(found: dict[str, Any]) -> list[str]:
    """The lines of the report."""
    rates, hosted, compiled = found["throughput"], found["host"], found["compile"]
    one, two = (float(np.median(rates[name])) for name in ("one", "two"))
    ratios = ", ".join(f"{ratio:.2f}" for ratio in rates["ratios"])
    return [
        "## Throughput of `rl_longtail`",
        "",
        "| | tokens/s (median) |",
        "|---|---:|",
        f"| one engine, two cores | {one:.0f} |",
        f"| two engines that share them | {two:.0f} |",
        "",
        f"Two over one: {np.median(rates['ratios']):.2f} (pairs: {ratios}).",
        "",
        f"## Host work of 8 engines with {ROWS} rows each",
        "",
        "| | ms |",
        "|---|---:|",
        f"| a dispatch of {STEPS} steps, one engine alone | {hosted['dispatch_s'] * 1e3:.1f} |",
        f"| its thread's CPU time, one engine alone | {hosted['host_of_1_s'] * 1e3:.2f} |",
        f"| a thread's CPU time, 8 engines | {hosted['host_of_8_s'] * 1e3:.2f} |",
        "",
        f"A thread's share of a dispatch: {hosted['share']:.1%} (limit {MAX_HOST_SHARE:.0%}). "
        f"All 8 one after another: {hosted['share_of_all']:.1%}.",
        "",
        "## Tokens of four engines in `rl_longtail`",
        "",
        "| tokens of each | most above the mean |",
        "|---|---:|",
        *(
            f"| {', '.join(map(str, run['tokens']))} | {run['imbalance']:.1%} |"
            for run in found["balance"]["runs"]
        ),
        "",
        f"The limit is {MAX_IMBALANCE:.0%}.",
        "",
        "## Compilation",
        "",
        "| engines | programs | s | of one engine |",
        "|---:|---:|---:|---:|",
        *(
            f"| {count} | {each['num_programs']} | {each['seconds']:.1f} "
            f"| {each['seconds'] / compiled['1']['seconds']:.2f} |"
            for count, each in compiled.items()
        ),
    ]


def main() -> None:
    """Measures all parts, or one of them for the process that does."""
    parser = argparse.ArgumentParser(description="What a group of engines costs.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/group.md")
    args = parser.parse_args()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "throughput": functools.partial(throughput, args.repeats),
        "host": host,
        "balance": functools.partial(balance, args.repeats),
        **{f"compile-{count}": functools.partial(compilation, count) for count in (1, 2, 8)},
    }
    if args.part is not None:
        print(_MARK + json.dumps(parts[args.part]()))
        return
    devices = {"throughput": 2, "host": 8, "balance": 4}
    found: dict[str, Any] = {
        name: run_part(name, count, args.repeats) for name, count in devices.items()
    }
    found["compile"] = {
        str(count): run_part(f"compile-{count}", count, args.repeats) for count in (1, 2, 8)
    }
    environment = describe_environment("cpu, simulated devices")
    head = report_head(
        "A group of engines on simulated devices",
        "benchmarks/throughput/group.py",
        environment,
        f"Model: {SMALL_IN_WORDS}, vocabulary {SMALL.vocab_size}, float32",
    )
    write_report(args.output, [*head, *table(found)], environment, found)


if __name__ == "__main__":
    main()
