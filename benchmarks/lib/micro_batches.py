"""The size of the micro-batches in which Tunix's sampler answers a workload fastest."""

from __future__ import annotations

import dataclasses
import time

from tunix.models.qwen3.model import Qwen3

from sgljax_engine import ModelConfig
from tunix_sgljax.bench.vanilla import VanillaPeer, batches
from tunix_sgljax.bench.workloads import Workload

_PROBE_STEPS = 16
_MICRO_BATCHES = (8, 16, 32, 64)


def best_micro_batch(
    model: Qwen3, config: ModelConfig, workload: Workload, whole_s: float
) -> int | None:
    """The micro-batch size with the least estimated time; None if none beats `whole_s`.

    Tried are 8, 16, 32 and 64 requests, as far as there are more in all; of few requests, 1.

    Args:
        model: Tunix's.
        config: Its shape.
        workload: What it would run.
        whole_s: Seconds that it takes in one whole batch.
    """
    total = len(workload.output_lengths)
    sizes = [size for size in _MICRO_BATCHES if size < total] or [1] * (total > 1)
    seconds = {size: _estimate_s(model, config, workload, size) for size in sizes}
    for size, estimate in seconds.items():
        print(f"  batches of {size}: about {estimate:.1f} s", flush=True)
    best = min(seconds, key=lambda size: seconds[size], default=None)
    return best if best is not None and seconds[best] < whole_s else None


def _estimate_s(model: Qwen3, config: ModelConfig, workload: Workload, size: int) -> float:
    """From a run of the first micro-batch with one step and one with 17 steps."""
    peer = VanillaPeer(model, config, workload, size)
    num_steps = min(1 + _PROBE_STEPS, workload.max_output_len)
    prompts = tuple(map(tuple, workload.requests[:size]))
    times: list[float] = []
    for count in (1, num_steps):
        probe = dataclasses.replace(
            workload,
            prompts=prompts,
            num_samples=1,
            output_lengths=(count,) * len(prompts),
            num_rows=len(prompts),
        )
        peer.generate(probe)  # compiles
        start = time.perf_counter()
        peer.generate(probe)
        times.append(time.perf_counter() - start)
    peer.close()
    step_s = (times[1] - times[0]) / (num_steps - 1)
    return sum(times[0] + (max(lengths) - 1) * step_s for _, lengths in batches(workload, size))
