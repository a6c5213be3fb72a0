"""`python -m tools.simulation`: how long rollouts would take, by order and over-sampling."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sgljax_engine import InvalidConfigError
from tools import command
from tunix_sgljax.cli.output import emit, say

if TYPE_CHECKING:
    from tools.simulation import Lengths, Outcome

SUMMARY = "Simulate a training's rollouts: orders of requests, over-sampling, rows."

EXAMPLES = """examples:
  python -m tools.simulation --hardware h200 --rows 64 --requests 256
  python -m tools.simulation --hardware cpu --rows 32 --requests 128 --prompts 64 --steps 1000
  python -m tools.simulation --lengths lengths.json --rows 128 --requests 512

Nothing is loaded or run: the engine's scheduler plans over a table of step times. With --prompts, a
data set of so many prompts is gone through again and again, and earlier answers tell lengths.
--lengths reads {"lengths": [[...], ...]}, a list for each prompt, in place of drawing them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument(
        "--hardware", default="h200", help="a table of step times: cpu, v5e, h100, h200 (h200)"
    )
    parser.add_argument("--rows", type=int, default=64, help="max_running_requests (64)")
    parser.add_argument("--requests", type=int, default=256, help="samples of a step (256)")
    parser.add_argument("--samples", type=int, default=8, help="samples of a prompt (8)")
    parser.add_argument("--prompts", type=int, help="prompts of the data set (each is new)")
    parser.add_argument("--max-age", type=int, default=1, help="updates of a carried group (1)")
    parser.add_argument("--steps", type=int, default=100, help="steps of each way (100)")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths (0)")
    parser.add_argument("--median", type=float, default=256.0, help="tokens of an answer (256)")
    parser.add_argument("--prompt-sigma", type=float, default=0.7, help="among prompts (0.7)")
    parser.add_argument("--sample-sigma", type=float, default=0.5, help="of a prompt (0.5)")
    parser.add_argument("--max-tokens", type=int, default=2048, help="limit of an answer (2048)")
    parser.add_argument("--lengths", metavar="FILE", help="recorded lengths")
    parser.add_argument("--json", metavar="FILE", help="write all numbers there")


def run(args: argparse.Namespace) -> int:
    """Simulates every way and writes a table."""
    from tools.simulation import Plan, compare_ways, find_table

    if args.requests % args.samples:
        raise InvalidConfigError(
            f"--requests must be a multiple of --samples ({args.samples}), got {args.requests}"
        )
    table, lengths = find_table(args.hardware), _lengths(args)
    plan = Plan(
        num_groups=args.requests // args.samples,
        num_samples=args.samples,
        num_rows=args.rows,
        max_age=args.max_age,
        seed=args.seed,
    )
    if args.prompts is not None:
        plan = dataclasses.replace(plan, num_prompts=args.prompts)
    say(f"step times: {table.source}")
    emit("| | s a step | speed | idle rows | tail, s | tokens | carried groups | dropped tokens |")
    emit("|---|---:|---:|---:|---:|---:|---:|---:|")
    outcomes = []
    for outcome in compare_ways(plan, lengths, table, args.steps):
        outcomes.append(outcome)
        emit(_line(outcome))
    if args.json:
        found = {
            "plan": dataclasses.asdict(plan),
            "hardware": args.hardware,
            "table": dataclasses.asdict(table),
            "outcomes": [dataclasses.asdict(outcome) for outcome in outcomes],
        }
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


def _lengths(args: argparse.Namespace) -> Lengths:
    from tools.simulation import LognormalLengths, read_lengths

    if args.lengths is not None:
        return read_lengths(args.lengths)
    return LognormalLengths(
        median=args.median,
        prompt_sigma=args.prompt_sigma,
        sample_sigma=args.sample_sigma,
        max_new_tokens=args.max_tokens,
    )


def _line(outcome: Outcome) -> str:
    return (
        f"| {outcome.name} | {outcome.step_s:.3f} | {outcome.speed:.2f} | {outcome.idle:.0%} "
        f"| {outcome.tail_s:.3f} | {outcome.mean_length:.0f} | {outcome.num_carried:.1f} "
        f"| {outcome.dropped:.0%} |"
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the tool; see `tools.command`."""
    return command.main("tools.simulation", SUMMARY, EXAMPLES, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
