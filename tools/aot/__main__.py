"""`python -m tools.aot`: compiles an engine's programs for devices that are not here."""

from __future__ import annotations

import argparse
import json
import os
import sys

from tools import command
from tools.aot.target import add_target_options, find_target
from tunix_sgljax.cli.engine_options import add_engine_options
from tunix_sgljax.cli.output import emit, say

SUMMARY = "Compile an engine's programs for chips that are not here, and say what they cost."

EXAMPLES = """examples:
  python -m tools.aot --model path/to/Qwen3-0.6B --topology v5e:1x1 --engine max_model_len=1024
  python -m tools.aot --model qwen3-8b --topology v5e:2x4 --tp 8 --engine max_model_len=4096
  python -m tools.aot --config configs/qwen3_8b_pathways.yaml --topology v6e:2x4 --json > it.json
  python -m tools.aot --config configs/qwen3_8b_pathways.yaml --topology v5e:2x4 --programs none
  python -m tools.aot --config configs/qwen3_0p6b_gpu.yaml --topology h100:1

The vendor's own compiler compiles here; nothing is run, and no weight is loaded. The exit code is 1
if the engine does not fit. For TPUs: pip install libtpu. For GPUs: pip install jax-cuda13-plugin
jax-cuda13-pjrt."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument(
        "--model", metavar="MODEL", help="a Hugging Face folder, or a name that Tunix knows"
    )
    add_target_options(parser)
    parser.add_argument(
        "--programs",
        choices=("largest", "all", "none"),
        default="largest",
        help="largest: decode, prefill and page copies of the largest batch; all: every program; "
        "none: say whether weights and KV cache fit",
    )
    parser.add_argument("--json", action="store_true", help="write JSON, with every operation")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Writes the report; returns 1 if the engine does not fit."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # a TPU that is here is left alone
    target = find_target(args)

    from tools.aot import compile_programs
    from tools.aot.words import describe, to_json

    report = compile_programs(
        target.model,
        chip=target.chip,
        mesh=target.mesh,
        config=target.config,
        folder=target.folder,
        which=args.programs,
        on_program=lambda name, size: say(f"compiling {name} of {size} for {args.topology}"),
    )
    if args.json:
        emit(json.dumps(to_json(report, target.title, args.topology), indent=2))
    else:
        emit(describe(report, target.title, args.topology))
    return 0 if report.problem is None else 1


def main(argv: list[str] | None = None) -> int:
    """Runs the tool; see `tools.command`."""
    return command.main("tools.aot", SUMMARY, EXAMPLES, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
