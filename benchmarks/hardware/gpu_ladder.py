"""What each change to a decode step brings on one GPU: a ladder of rungs, each one change more.

    python benchmarks/hardware/gpu_ladder.py

Rungs, in order of worth: which JAX runs, and one kernel; the engine with XLA's code around its
attention kernel; attention from projections on, with norms, rotary embedding and cache write in its
kernel; gates in their products; residuals in theirs; rollouts beside Tunix's sampler; weight sync,
sleep and wake; log-probs beside the trainer's; an MLP alone, by tiles; the workload of nano-vllm's
bench.py, and of kvcached; a whole training with GRPO; prefill; int8; dispatches of more steps;
samples with top-p, which sort; a hybrid and experts beside a dense model; cuBLAS and JAX's own
products for Hopper GPUs in place of Triton's; XLA's command buffers over loops and branches too,
and without any. `gpu_rungs.RUNGS` has them all.

Each rung is checked before it is timed: greedy log-probs against those of XLA's code, as far as
the tokens agree, and products against XLA's. One beyond its tolerance is reported as wrong and not
timed. Results are written after each rung. Rungs with XLA flags of their own run in a process of
their own; `--rung-s` ends a rung, and `--budget-s` the ladder, whatever runs. It runs with JAX 0.10
to 0.12.

`--smoke` runs it in miniature on any device, kernels interpreted: to see that it works. JAX's
products for Hopper GPUs cannot be interpreted; their rungs say that they did not run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.hardware.gpu_products import NotHereError
from benchmarks.hardware.gpu_rungs import BASE, RUNGS, Ladder
from benchmarks.hardware.gpu_sizes import Sizes
from benchmarks.lib.reporting import ROOT, write_results


def run_here(names: Sequence[str], *, is_smoke: bool, reference: Path) -> None:
    """Runs rungs in this process, and prints a line of JSON for each; a failure costs no other."""
    sizes = Sizes.smoke() if is_smoke else Sizes()
    ladder = Ladder(sizes, is_smoke=is_smoke, reference=reference)
    for name in names:
        found: dict[str, Any] = {"device": jax.devices()[0].device_kind}
        try:
            found |= ladder.run(RUNGS[name])
        except NotHereError as error:
            found["not run"] = str(error)
        except Exception as error:
            traceback.print_exc()
            found["error"] = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        print(json.dumps({"rung": name, **found}), flush=True)


def run_rungs(
    names: Sequence[str],
    budget_s: float,
    rung_s: float,
    *,
    is_smoke: bool,
    save: Callable[[Any], None],
) -> dict[str, dict[str, Any]]:
    """Runs rungs, neighbours with equal flags in one process, and saves after each.

    A rung that takes its process with it, or takes too long, is reported, and the next ones get
    another.
    """
    found: dict[str, dict[str, Any]] = {}
    end = time.monotonic() + budget_s
    with tempfile.TemporaryDirectory() as folder:
        for flags, group in itertools.groupby(names, key=lambda name: RUNGS[name].flags):
            left = list(group)
            while left and time.monotonic() < end:
                command = [sys.executable, __file__, "--reference", folder]
                command += ["--here", *left, *(["--smoke"] if is_smoke else [])]
                for one in _lines_of(command, flags, end, rung_s):
                    found[left.pop(0)] = one
                    save(found)
                if left and time.monotonic() < end:
                    found[left.pop(0)] = {"error": f"its process died, or it took {rung_s:g} s"}
                    save(found)
    for name in names:
        found.setdefault(name, {"error": f"left out, or cut off after {budget_s:g} s"})
    save(found)
    return found


def _lines_of(
    command: Sequence[str], flags: str, end: float, rung_s: float
) -> Iterator[dict[str, Any]]:
    """What `run_here` prints in a process with XLA flags of its own.

    It is killed when the ladder's time, or that of a line, is up.
    """

    def started_timer(process: subprocess.Popen[str]) -> threading.Timer:
        timer = threading.Timer(max(min(end - time.monotonic(), rung_s), 0.0), process.kill)
        timer.start()
        return timer

    given = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    with subprocess.Popen(
        command, env={**os.environ, "XLA_FLAGS": given}, stdout=subprocess.PIPE, text=True
    ) as process:
        timer = started_timer(process)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith('{"rung"'):
                    timer.cancel()
                    one = json.loads(line)
                    del one["rung"]
                    yield one
                    timer = started_timer(process)
        finally:
            timer.cancel()
            process.kill()


def report_lines(found: dict[str, dict[str, Any]]) -> list[str]:
    """The report: a table of the decode steps, and lists of the others."""
    lines = ["| rung | step, ms | tokens/s | over base | log-probs differ by |"]
    lines.append("|---|---:|---:|---:|---:|")
    base = found.get(BASE, {}).get("step, ms")
    others = []
    for name in (name for name in RUNGS if name in found):
        one = found[name]
        if "error" in one:
            lines.append(f"| {name} | failed: {one['error'][:150]} | | | |")
        elif one.get("is_right") is False:
            lines.append(f"| {name} | wrong, not timed | | | {one['largest difference']:.3g} |")
        elif "step, ms" in one:
            gain = f"{base / one['step, ms']:.2f}" if base else ""
            lines.append(
                f"| {name} | {one['step, ms']:.3g} | {one['tokens/s']:,.0f} | {gain} "
                f"| {one['largest difference']:.3g} |"
            )
        else:
            values = {key: value for key, value in one.items() if key != "device"}
            others += ["", f"## {name}", ""]
            others += [f"- {key}: {_in_words(value)}" for key, value in values.items()]
    return lines + others


def _in_words(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.4g}"


def main(argv: Sequence[str] | None = None) -> None:
    """Climbs the ladder and writes the report.

    With `--here` it runs some rungs for the process that asked, and prints JSON; `--reference` is
    the folder of log-probs.
    """
    parser = argparse.ArgumentParser(description="Changes to a decode step on one GPU.")
    parser.add_argument("--smoke", action="store_true", help="in miniature, on any device")
    parser.add_argument(
        "--only", nargs="+", choices=RUNGS, default=list(RUNGS), metavar="RUNG", help="these alone"
    )
    parser.add_argument("--budget-s", type=float, default=450.0)
    parser.add_argument("--rung-s", type=float, default=120.0, help="most seconds of a rung")
    parser.add_argument("--here", nargs="+", choices=RUNGS, help=argparse.SUPPRESS)
    parser.add_argument("--reference", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/gpu_ladder.md")
    args = parser.parse_args(argv)
    if args.here:
        run_here(args.here, is_smoke=args.smoke, reference=args.reference)
        return
    sizes = Sizes.smoke() if args.smoke else Sizes()

    def save(found: dict[str, dict[str, Any]]) -> None:
        devices = {one["device"] for one in found.values() if "device" in one}
        write_results(
            args.output,
            "Changes to a decode step on one GPU",
            "benchmarks/hardware/gpu_ladder.py" + " --smoke" * args.smoke,
            report_lines(found),
            {"rungs": found},
            facts=[
                f"Model: {sizes.in_words()}, random weights, bfloat16",
                f"{sizes.rows} rows, contexts of {sizes.context} to "
                f"{sizes.context + sizes.num_steps}; rollouts of prompts of "
                f"{sizes.rollout.prompt_low} to {sizes.rollout.prompt_high} tokens, answers of "
                f"{sizes.rollout.output_low} to {sizes.rollout.output_high}",
            ],
            device=", ".join(sorted(devices)),
        )

    run_rungs(args.only, args.budget_s, args.rung_s, is_smoke=args.smoke, save=save)


if __name__ == "__main__":
    main()
