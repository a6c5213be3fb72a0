"""Where the time of a decode step goes on one GPU, by products and XLA's command buffers.

    python benchmarks/hardware/gpu_profile.py

Each variant runs in a process of its own: the engine decodes on random weights of Qwen3-0.6B's
shape in bfloat16, first timed, then traced by JAX's profiler. The report has the time
of a step, how long kernels ran in it, and the kernels that took the most time.

`--smoke` runs one variant in miniature on any device.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.hardware.gpu_engine import EngineSizes, make_model, make_rollout
from benchmarks.lib.environment import describe_environment
from benchmarks.lib.reporting import ROOT, report_head, write_report
from benchmarks.lib.turns import timed
from sgljax_engine import SamplingParams

_ALL_BUFFERS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CONDITIONAL,WHILE"


class Variant(NamedTuple):
    """XLA's flags, and the engine's `linear_backend`."""

    flags: str = ""
    linear_backend: str = "xla"


VARIANTS = {
    "command buffers off": Variant("--xla_gpu_enable_command_buffer="),
    "XLA's default": Variant(),
    "loops and custom calls too": Variant(f"--xla_gpu_enable_command_buffer={_ALL_BUFFERS}"),
    "fused products": Variant(linear_backend="pallas"),
}
_NUM_KERNELS = 25


def device_events(folder: Path) -> Iterator[tuple[str, float]]:
    """Name and duration in ns of each kernel in the trace below a folder."""
    for path in sorted(folder.rglob("*.xplane.pb")):
        planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
        on_gpu = [plane for plane in planes if plane.name.startswith("/device:GPU")]
        for plane in on_gpu:
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    for event in line.events:
                        yield event.name, event.duration_ns


def _traced(run: Callable[[], None]) -> dict[str, list[float]]:
    """Durations in ns of each kernel of a run, by its name."""
    kernels: dict[str, list[float]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        for name, duration in device_events(Path(folder)):
            kernels[name].append(duration)
    return kernels


def measure(sizes: EngineSizes, rows: int, linear_backend: str) -> dict[str, Any]:
    """One variant, in this process."""
    rollout = make_rollout(
        make_model(sizes),
        "auto",
        max_model_len=sizes.context + sizes.num_steps + 1,
        rows=rows,
        buckets=(rows,),
        linear_backend=linear_backend,
    )
    rng = np.random.default_rng(1)

    def run(new_tokens: int) -> None:
        prompts = rng.integers(1, sizes.model.vocab_size, (rows, sizes.context)).tolist()
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        rollout.engine.generate_requests(prompts, params)

    steps = sizes.num_steps
    for new_tokens in (1, steps + 1, 1, steps + 1):
        run(new_tokens)
    once = float(np.median([timed(lambda: run(1)) for _ in range(5)]))
    full = float(np.median([timed(lambda: run(steps + 1)) for _ in range(5)]))
    device = jax.devices()[0].device_kind
    found: dict[str, Any] = {"device": device, "rows": rows, "step_ms": 1e3 * (full - once) / steps}
    prefill, decode = (_traced(functools.partial(run, n)) for n in (1, steps + 1))
    rollout.close()
    total: dict[str, tuple[float, float]] = {}  # number and seconds in a step, by kernel
    for name, times in decode.items():
        count, spent = len(times) - len(prefill[name]), sum(times) - sum(prefill[name])
        total[name] = count / steps, spent / steps * 1e-9
    found["kernels_per_step"] = sum(count for count, _ in total.values())
    found["kernel_ms_per_step"] = 1e3 * sum(spent for _, spent in total.values())
    ranked = sorted(total.items(), key=lambda item: -item[1][1])[:_NUM_KERNELS]
    found["top"] = [
        {"kernel": name, "per_step": count, "us_per_step": 1e6 * spent}
        for name, (count, spent) in ranked
    ]
    return found


def run_variants(rows: int, timeout_s: float, names: Sequence[str]) -> dict[str, Any]:
    """Each variant in a process of its own; what failed has its error."""
    found: dict[str, Any] = {}
    for name in names:
        variant = VARIANTS[name]
        flags = f"{os.environ.get('XLA_FLAGS', '')} {variant.flags}".strip()
        command = [sys.executable, __file__, "--one", "--rows", str(rows)]
        command += ["--linear-backend", variant.linear_backend]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "XLA_FLAGS": flags},
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=True,
            )
            found[name] = json.loads(done.stdout.splitlines()[-1])
        except subprocess.CalledProcessError as error:
            found[name] = {"error": "\n".join(error.stderr.splitlines()[-15:])}
        except subprocess.TimeoutExpired:
            found[name] = {"error": f"took more than {timeout_s:g} s"}
        print(name, json.dumps(found[name], indent=1), flush=True)
    return found


def report_lines(found: dict[str, Any]) -> list[str]:
    """The tables of the report."""
    lines = [
        "| variant | step, ms | kernels a step | their time, ms |",
        "|---|---:|---:|---:|",
    ]
    for name, one in found.items():
        if "error" in one:
            lines.append(f"| {name} | failed: {one['error'].splitlines()[-1][:120]} | | |")
            continue
        cells = (one["step_ms"], one["kernels_per_step"], one["kernel_ms_per_step"])
        lines.append(f"| {name} | " + " | ".join(f"{cell:.3g}" for cell in cells) + " |")
    for name, one in found.items():
        if one.get("top"):
            lines += ["", f"## {name}", "", "| kernel | a step | us a step |"]
            lines.append("|---|---:|---:|")
            for each in one["top"]:
                numbers = (each["per_step"], each["us_per_step"])
                cells = " | ".join(f"{number:.3g}" for number in numbers)
                lines.append(f"| `{each['kernel'][:80]}` | {cells} |")
    return lines


def main() -> None:
    """Measures the variants and writes the report, or one variant for the process that asked."""
    parser = argparse.ArgumentParser(description="A decode step on one GPU, kernel by kernel.")
    parser.add_argument("--smoke", action="store_true", help="in miniature, on any device")
    parser.add_argument("--one", action="store_true", help="with this process's XLA flags, as JSON")
    parser.add_argument("--linear-backend", default="xla", help="for --one and --smoke")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--timeout-s", type=float, default=150.0)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/gpu_profile.md")
    args = parser.parse_args()
    if args.smoke or args.one:
        sizes = EngineSizes.smoke() if args.smoke else EngineSizes()
        rows = 4 if args.smoke else args.rows
        print(json.dumps(measure(sizes, rows, args.linear_backend)))
        return
    found = run_variants(args.rows, args.timeout_s, args.only)
    devices = {one["device"] for one in found.values() if "device" in one}
    environment = describe_environment(", ".join(sorted(devices)))
    sizes = EngineSizes()
    head = report_head(
        "A decode step on one GPU, kernel by kernel",
        "benchmarks/hardware/gpu_profile.py",
        environment,
        f"Model: {sizes.in_words()}, random weights, bfloat16",
        f"{args.rows} rows, contexts of {sizes.context} to {sizes.context + sizes.num_steps}",
    )
    write_report(args.output, head + report_lines(found), environment, {"variants": found})


if __name__ == "__main__":
    main()
