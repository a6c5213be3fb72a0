"""The engine and its attention kernels on one GPU, against the GPU's limits and Tunix's sampler.

    python benchmarks/hardware/gpu.py

Sections: the GPU's ceilings; decode and prefill attention of each backend against them; GRPO-like
rollouts (16 prompts of 64 to 128 tokens, 8 samples each of lognormal length, 16 to 512) of the
engine with each backend and of Tunix's vanilla sampler, in turns, on the same random weights of
Qwen3-0.6B's shape in bfloat16; decode steps by batch size against the time of reading weights and
keys once; log-probs against Tunix's trainer; weight sync, sleep and wake; and what deterministic
sampling costs.

A section that fails is reported with its error and the others go on; results are written after
each. `--budget-s` leaves out sections that would begin too late.

`--smoke` runs all of it in miniature on any device, the kernel interpreted: to see that it works.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.hardware.gpu_engine import (
    EngineSizes,
    measure_decode_steps,
    measure_determinism,
    measure_rollouts,
)
from benchmarks.hardware.gpu_kernels import (
    Attend,
    Ceilings,
    KernelResult,
    KernelSizes,
    measure_ceilings,
    measure_decode,
    measure_prefill,
)
from benchmarks.hardware.gpu_training import measure_interruptions, measure_mismatch
from benchmarks.lib.environment import describe_environment
from benchmarks.lib.reporting import ROOT, report_head, write_report
from sgljax_engine.attention.pallas import PallasAttention
from sgljax_engine.attention.xla import XlaAttention


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured, and with which backends.

    Attributes:
        kernels: Of the kernel sections.
        engine: Of the engine sections.
        backends: Attention, by name.
        engine_backends: Options of the engine to compare.
    """

    kernels: KernelSizes
    engine: EngineSizes
    backends: dict[str, Attend]
    engine_backends: tuple[str, ...]


def _backends(*, interpret: bool) -> dict[str, Attend]:
    pallas = PallasAttention(is_fused=True, interpret=interpret)
    return {"pallas": pallas.attend, "xla": XlaAttention().attend}


def full_sizes() -> Sizes:
    """What is measured on a GPU."""
    return Sizes(
        kernels=KernelSizes(),
        engine=EngineSizes(),
        backends=_backends(interpret=False),
        engine_backends=("pallas", "xla"),
    )


def smoke_sizes() -> Sizes:
    """The same in miniature, for any device."""
    return Sizes(
        kernels=KernelSizes.smoke(),
        engine=EngineSizes.smoke(),
        backends=_backends(interpret=True),
        engine_backends=("xla",),
    )


@dataclasses.dataclass
class Report:
    """What has been found so far: Markdown lines and the data of each section."""

    lines: list[str]
    data: dict[str, Any]

    def table(self, head: Sequence[str], rows: Iterator[Sequence[Any]]) -> None:
        """Adds a table row by row, so that rows before a failure are kept."""
        self.lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for row in rows:
            cells = (f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row)
            self.lines.append("| " + " | ".join(cells) + " |")
            print(self.lines[-1], flush=True)
        self.lines.append("")


def _kernel_rows(report: Report, name: str, results: Iterator[KernelResult]) -> Iterator[list[Any]]:
    data = report.data.setdefault(name, [])
    for r in results:
        data.append({**r._asdict(), "fraction": r.fraction})
        times = f"{r.time_s * 1e6:.1f}", f"{r.limit_s * 1e6:.1f}", f"{100 * r.fraction:.0f} %"
        yield [r.backend, r.batch, r.context, *times]


def _rows(
    report: Report, name: str, results: Iterator[dict[str, Any]]
) -> tuple[list[str], Iterator[list[Any]]]:
    """Results as rows; the first one, already measured, gives the names of the columns."""
    data = report.data.setdefault(name, [])
    first = next(results)

    def rows() -> Iterator[list[Any]]:
        for result in itertools.chain([first], results):
            data.append(result)
            yield list(result.values())

    return list(first), rows()


def run_sections(
    sizes: Sizes, only: str, budget_s: float, save: Callable[[Report], None], report: Report
) -> None:
    """Runs the sections whose titles match; a failure costs no other section. Saves after each."""
    # The ceilings of an H200's data sheet, should measuring them fail.
    ceilings = [Ceilings(990e12, 4.8e12)]

    def find_ceilings() -> None:
        ceilings[0] = measure_ceilings(sizes.kernels)
        report.data["ceilings"] = ceilings[0]._asdict()
        flops, rate = ceilings[0]
        report.lines += [
            f"- bfloat16 matrix product: {flops / 1e12:.0f} TFLOP/s",
            f"- copy: {rate / 1e12:.2f} TB/s, read and written",
            "",
        ]

    def kernels(name: str, measure: Callable[..., Iterator[KernelResult]], *args: Any) -> None:
        head = ["backend", "rows or blocks", "keys", "us", "limit, us", "of limit"]
        results = measure(*args, sizes.kernels, ceilings[0])
        report.table(head, _kernel_rows(report, name, results))

    def engine(name: str, measure: Callable[..., Iterator[dict[str, Any]]]) -> None:
        results = measure(sizes.engine, sizes.engine_backends, ceilings[0])
        report.table(*_rows(report, name, results))

    sections: dict[str, Callable[[], None]] = {
        "Ceilings": find_ceilings,
        "Decode attention": lambda: kernels("decode_attention", measure_decode, sizes.backends),
        "Prefill attention": lambda: kernels("prefill_attention", measure_prefill, sizes.backends),
        "Rollouts": lambda: engine("rollouts", measure_rollouts),
        "Decode steps": lambda: engine("decode_steps", measure_decode_steps),
        "Log-probs against the trainer's": lambda: engine("mismatch", measure_mismatch),
        "Weight sync, sleep and wake": lambda: engine("interruptions", measure_interruptions),
        "Deterministic sampling": lambda: engine("determinism", measure_determinism),
    }
    start = time.monotonic()
    for title, section in sections.items():
        if not re.search(only, title):
            continue
        print(f"\n== {title}, after {time.monotonic() - start:.0f} s", flush=True)
        report.lines += [f"## {title}", ""]
        if time.monotonic() - start > budget_s:
            report.lines += [f"Left out: {budget_s:g} s had passed.", ""]
            save(report)
            continue
        try:
            section()
        except Exception as error:
            traceback.print_exc()
            report.data.setdefault("failures", {})[title] = traceback.format_exc()
            first = next(iter(str(error).splitlines()), "")
            report.lines += ["", f"Failed: {type(error).__name__}: {first}", ""]
        save(report)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes the results; exits with 1 when a section failed."""
    parser = argparse.ArgumentParser(description="The engine on one GPU.")
    parser.add_argument("--smoke", action="store_true", help="in miniature, on any device")
    parser.add_argument("--only", default="", help="sections whose titles this expression matches")
    parser.add_argument("--backends", nargs="+", help="of attention; all that are compared")
    parser.add_argument("--budget-s", type=float, default=480.0)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/gpu.md")
    args = parser.parse_args(argv)
    platform = jax.default_backend()
    if platform != "gpu" and not args.smoke:
        parser.error(f"this needs a GPU, and JAX's default device is a {platform}; or --smoke")
    sizes = smoke_sizes() if args.smoke else full_sizes()
    if args.backends:
        kernels = {name: sizes.backends[name] for name in args.backends}
        sizes = dataclasses.replace(sizes, backends=kernels, engine_backends=tuple(args.backends))
    device = jax.devices()[0]
    environment = describe_environment(device.device_kind)
    platform_version = " ".join(device.client.platform_version.split())
    head = report_head(
        "The engine on one GPU",
        "benchmarks/hardware/gpu.py" + " --smoke" * args.smoke,
        environment,
        f"Platform: {platform_version}",
        f"Model: {sizes.engine.in_words()}, random weights, bfloat16",
        f"Attention kernels: {sizes.kernels.num_heads}/{sizes.kernels.num_kv_heads} heads of "
        f"{sizes.kernels.head_dim}, pages of {sizes.kernels.page_size}, bfloat16; prefill of "
        f"{sizes.kernels.prefill_tokens} tokens",
    )
    report = Report([], {"platform_version": platform_version})

    def save(report: Report) -> None:
        write_report(args.output, head + report.lines, environment, report.data)

    run_sections(sizes, args.only, args.budget_s, save, report)
    if "failures" in report.data:
        raise SystemExit(f"failed: {', '.join(report.data['failures'])}")


if __name__ == "__main__":
    main()
