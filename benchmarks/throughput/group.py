"""A group of engines: throughput and host work, on simulated devices.

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
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks.lib.reporting import make_parser, output_dir, write_results
from benchmarks.lib.turns import speed_table
from sgljax_engine import Engine, ModelConfig, SamplingParams
from tunix_sgljax.bench.shapes import SMALL, SMALL_IN_WORDS
from tunix_sgljax.bench.workloads import Workload, make_workload

ROWS, STEPS, CONTEXT = 64, 16, 128
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


def throughput(repeats: int) -> dict[str, Any]:
    """Seconds of one engine and of two, in turns; prompts that no engine has seen in each."""
    num_rows = new_workload(0).num_rows
    engines = {f"{count} engines": make_engine(SMALL, count, num_rows) for count in (1, 2)}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for engine in engines.values():
        engine.warmup()
    for turn in range(-1, repeats):
        workload = new_workload(turn + 1)
        for name in list(engines)[:: 1 if turn % 2 else -1]:
            took_s = run_workload(engines[name], workload)
            seconds[name] += [took_s] if turn >= 0 else []
    return seconds


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


def host(_: int) -> dict[str, Any]:
    """What the threads of 8 engines cost, against a dispatch of one engine alone."""
    wall_one, cpu_one = decode_steps(1)
    _, cpu_all = decode_steps(8)
    return {
        "dispatch_s": wall_one,
        "host_of_1_s": cpu_one,
        "host_of_8_s": cpu_all,
        "share": cpu_all / wall_one,
        "share_of_all": 8 * cpu_all / wall_one,
    }


PARTS = {"throughput": (throughput, 2), "host": (host, 8)}
"""What measures each part, and the devices that it needs."""


def run_part(name: str, repeats: int) -> dict[str, Any]:
    """Runs a part in a process with the devices that it needs."""
    flags = f"--xla_force_host_platform_device_count={PARTS[name][1]}"
    command = [sys.executable, __file__, "--part", name, "--pairs", str(repeats)]
    variables = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    print(name, line, flush=True)
    return json.loads(line.removeprefix(_MARK))


def table(found: dict[str, Any]) -> list[str]:
    """The lines of the report."""
    hosted = found["host"]
    return [
        "## Throughput of `rl_longtail`, both on the same two cores",
        "",
        *speed_table({"": found["throughput"]}, "1 engines"),
        "",
        f"## Host work of 8 engines with {ROWS} rows each",
        "",
        "| | ms |",
        "|---|---:|",
        f"| a dispatch of {STEPS} steps, one engine alone | {hosted['dispatch_s'] * 1e3:.1f} |",
        f"| its thread's CPU time, one engine alone | {hosted['host_of_1_s'] * 1e3:.2f} |",
        f"| a thread's CPU time, 8 engines | {hosted['host_of_8_s'] * 1e3:.2f} |",
        "",
        f"A thread's share of a dispatch: {hosted['share']:.1%}. "
        f"All 8 one after another: {hosted['share_of_all']:.1%}.",
    ]


def main() -> None:
    """Measures all parts, or one of them for the process that does."""
    parser = make_parser(__doc__, pairs=5)
    parser.add_argument("--part", choices=PARTS, help="alone, as a line of JSON")
    args = parser.parse_args()
    repeats = 1 if args.quick else args.pairs
    if args.part is not None:
        print(_MARK + json.dumps(PARTS[args.part][0](repeats)))
        return
    found = {name: run_part(name, repeats) for name in PARTS}
    write_results(
        output_dir(args) / "group.md",
        "A group of engines on simulated devices",
        "benchmarks/throughput/group.py",
        table(found),
        found,
        facts=[f"Model: {SMALL_IN_WORDS}, vocabulary {SMALL.vocab_size}, float32"],
        device="cpu, simulated devices",
    )


if __name__ == "__main__":
    main()
