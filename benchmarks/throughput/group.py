"""What a group of engines costs the host, on simulated devices.

    python benchmarks/throughput/group.py

All devices are the cores of this machine, so a group cannot be faster here than one engine. What is
measured is the work of its threads: 8 engines with 64 rows each decode, and the CPU seconds of an
engine thread in a dispatch are its scheduling, building batches, handing arrays to JAX and
publishing tokens. Python's lock lets one thread run at a time, so their sum is what 8 devices wait
for in the worst case. It is compared with the seconds of a dispatch of one engine alone.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks.lib.reporting import make_parser, output_dir, write_results
from benchmarks.lib.shapes import SMALL, SMALL_IN_WORDS
from sgljax_engine import Engine, SamplingParams

NUM_ENGINES, ROWS, STEPS, CONTEXT = 8, 64, 16, 128


class HostClock:
    """Wall and CPU seconds that an engine's thread spends in its steps."""

    def __init__(self, core: Any) -> None:
        """Wraps the steps of an engine that has nothing to do."""
        self.steps: list[tuple[float, float]] = []
        self._step = core.step
        core.step = self._timed

    def _timed(self) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        self._step()
        self.steps.append((time.perf_counter() - wall, time.thread_time() - cpu))


def dispatch_seconds(num_engines: int, num_dispatches: int) -> tuple[float, float]:
    """Median seconds of a dispatch of 64 rows, and CPU seconds that its thread spends on it."""
    num_rows, num_tokens = ROWS * num_engines, num_dispatches * STEPS
    with Engine(
        model_config=SMALL,
        load_format="dummy",
        mesh=Mesh(np.asarray(jax.devices()[:num_engines]), ("data",)),
        max_running_requests=num_rows,
        num_kv_tokens=num_rows * 2 * CONTEXT,
        decode_steps=STEPS,
        compilation_cache_dir=None,
    ) as engine:
        engine.warmup()
        clocks = [HostClock(loop._core) for loop in engine._group.loops]
        rng = np.random.default_rng(0)
        prompts = rng.integers(1, SMALL.vocab_size, (num_rows, CONTEXT // 2)).tolist()
        params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
        outputs = engine.generate_requests(prompts, params)
        assert all(len(output.output_ids) == num_tokens for output in outputs)
    full = [step for clock in clocks for step in clock.steps[2:-1]]  # not the prefill's
    wall_s, cpu_s = np.median(np.asarray(full), axis=0).tolist()
    return wall_s, cpu_s


def main() -> None:
    """Measures and writes the results."""
    args = make_parser(__doc__).parse_args()
    jax.config.update("jax_num_cpu_devices", NUM_ENGINES)
    num_dispatches = 5 if args.quick else 8
    dispatch_s, one_s = dispatch_seconds(1, num_dispatches)
    _, each_s = dispatch_seconds(NUM_ENGINES, num_dispatches)
    share = each_s / dispatch_s
    write_results(
        output_dir(args) / "group.md",
        "A group of engines on simulated devices",
        "benchmarks/throughput/group.py",
        [
            "| | ms |",
            "|---|---:|",
            f"| a dispatch of {STEPS} steps, one engine alone | {dispatch_s * 1e3:.1f} |",
            f"| its thread's CPU time, one engine alone | {one_s * 1e3:.2f} |",
            f"| a thread's CPU time, {NUM_ENGINES} engines | {each_s * 1e3:.2f} |",
            "",
            f"A thread's share of a dispatch: {share:.1%}. All {NUM_ENGINES} one after another: "
            f"{NUM_ENGINES * share:.1%}.",
        ],
        {"dispatch_s": dispatch_s, "host_of_1_s": one_s, "host_of_8_s": each_s},
        facts=[
            f"Model: {SMALL_IN_WORDS}, vocabulary {SMALL.vocab_size}, float32; {ROWS} rows each"
        ],
    )


if __name__ == "__main__":
    main()
