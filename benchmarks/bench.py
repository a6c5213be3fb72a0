"""`python -m benchmarks.bench`: speed on this machine, alone or against Tunix's vanilla sampler."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgljax_engine import InvalidConfigError, ModelConfig, UnsupportedModelError
from tools import command
from tunix_sgljax.cli.engine_options import (
    add_engine_options,
    engine_config,
    model_folder,
    read_pairs,
)
from tunix_sgljax.cli.interrupt import EXIT_INTERRUPTED
from tunix_sgljax.cli.output import emit, say

if TYPE_CHECKING:
    from benchmarks.lib.peers import EnginePeer
    from benchmarks.lib.report import Comparison, Measurement
    from benchmarks.lib.workloads import Workload

SUMMARY = "Measure speed on this machine, alone or against Tunix's vanilla sampler."

EXAMPLES = """examples:
  python -m benchmarks.bench --random small
  python -m benchmarks.bench --random small --against vanilla --workloads rl_longtail
  python -m benchmarks.bench --model Qwen3-0.6B --length-scale 4 --json bench.json
  python -m benchmarks.bench --random path/to/config.json --repeats 1

Workloads, whose lengths --length-scale multiplies:
  rl_longtail    a GRPO step: 16 prompts of 64 to 128 tokens, 8 samples each of 16 to 256
  rl_uniform     the same, every sample of 128 tokens, 64 at a time
  long_prompt    8 samples of 64 tokens of one prompt of 2048
  single_stream  one request of 128 tokens after a prompt of 128

Useful tokens are those that requests ask for. Programs are compiled before the runs; --against
takes turns with the other sampler, on the same weights and requests."""

DEFAULT_WORKLOADS = ("rl_longtail", "rl_uniform", "long_prompt", "single_stream")
VANILLA = "vanilla"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", metavar="FOLDER", help="a Hugging Face folder")
    source.add_argument(
        "--random",
        metavar="SHAPE",
        help="random weights: tiny, small, qwen3-0.6b, or the path of a config.json",
    )
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=DEFAULT_WORKLOADS,
        default=DEFAULT_WORKLOADS,
        metavar="NAME",
        help=f"some of {', '.join(DEFAULT_WORKLOADS)} (all)",
    )
    parser.add_argument("--quick", action="store_true", help="few and short requests, to try it")
    parser.add_argument("--length-scale", type=float, default=1.0, help="times all lengths (1)")
    parser.add_argument("--repeats", type=int, default=3, help="runs, or pairs of them (3)")
    parser.add_argument("--against", choices=(VANILLA,), help="compare with this sampler")
    parser.add_argument("--json", metavar="FILE", help="write all numbers there")
    parser.add_argument("--quiet", action="store_true", help="write the table only")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measures; if interrupted, writes the results so far and returns 130."""
    for name in ("repeats", "length_scale"):
        if getattr(args, name) <= 0:
            raise InvalidConfigError(
                f"--{name.replace('_', '-')} must be above 0, got {getattr(args, name)}"
            )
    for name in ("max_model_len", "max_running_requests"):
        if name in read_pairs("--engine", args.engine):
            raise InvalidConfigError(f"--engine {name} is set by the workload")
    config, folder = find_model(args)
    engine_config(args)
    if args.json is not None:
        Path(args.json).open("a").close()  # refused now, not after the measurement

    from benchmarks.lib.report import format_table

    measurements: list[Measurement] = []
    is_interrupted = False
    try:
        for measurement in measure(args, config, folder):
            measurements.append(measurement)
    except KeyboardInterrupt:
        is_interrupted = True
        say("interrupted: what was measured follows")
    if measurements:
        emit("\n".join(format_table(measurements)))
    if args.json is not None:
        import jax

        from benchmarks.lib.environment import describe_environment

        report = {
            "environment": dataclasses.asdict(describe_environment(jax.devices()[0].device_kind)),
            "arguments": {k: v for k, v in vars(args).items() if k not in ("command", "debug")},
            "model": dataclasses.asdict(config),
            "is_complete": not is_interrupted,
            "workloads": [measurement.to_dict() for measurement in measurements],
        }
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return EXIT_INTERRUPTED if is_interrupted else 0


def find_model(args: argparse.Namespace) -> tuple[ModelConfig, Path | None]:
    """The model's shape, and its folder unless the weights are random.

    Raises:
        InvalidConfigError: for anything else.
        UnsupportedModelError: for an architecture that is not implemented, or that the other
            sampler cannot run.
    """
    from benchmarks.lib.shapes import MODELS
    from sgljax_engine import load_model_config, model_config_from_hf

    if args.model is not None:
        folder = model_folder(args.model)
        return load_model_config(folder), folder
    if args.random in MODELS:
        config = MODELS[args.random].config
    elif Path(args.random).is_file():
        config = model_config_from_hf(json.loads(Path(args.random).read_text(encoding="utf-8")))
    else:
        raise InvalidConfigError(
            f"--random must be one of {', '.join(MODELS)}, or a config.json, got {args.random!r}"
        )
    if args.against and config.architecture != "Qwen3ForCausalLM":
        raise UnsupportedModelError(
            f"--against with --random takes a Qwen3ForCausalLM, got {config.architecture}"
        )
    return config, None


def measure(
    args: argparse.Namespace, config: ModelConfig, folder: Path | None
) -> Iterator[Measurement]:
    """Runs the workloads one after the other."""
    from benchmarks.lib.measure import timed
    from benchmarks.lib.report import Measurement
    from benchmarks.lib.workloads import FULL, QUICK, make_workload

    sizes = (QUICK if args.quick else FULL).scaled(args.length_scale)
    workloads = [make_workload(name, config.vocab_size, sizes=sizes) for name in args.workloads]
    for workload in workloads:
        if workload.max_model_len > config.context_length:
            raise InvalidConfigError(
                f"{workload.name} needs {workload.max_model_len} positions, the model has "
                f"{config.context_length}: lower --length-scale"
            )
    model = _tunix_model(args, config, folder) if args.against else None
    for workload in workloads:
        start = time.perf_counter()
        with contextlib.closing(_make_ours(args, config, folder, model, workload)) as ours:
            ours.start(workload)
            start_s = time.perf_counter() - start
            tokens, against = workload.useful_tokens, None
            _tell(args, f"{workload.name}: {tokens} tokens, started in {start_s:.1f} s")
            if model is None:
                runs_s = [timed(ours, workload) for _ in range(args.repeats)]
            else:
                runs_s, against = _compare(args, config, model, ours, workload)
            state = ours.engine.get_internal_state()
            yield Measurement(
                workload=workload.name,
                num_requests=len(workload.output_lengths),
                useful_tokens=tokens,
                runs_s=runs_s,
                first_token_s=[output.time_to_first_token_s or 0.0 for output in ours.outputs],
                latency_s=[output.e2e_latency_s for output in ours.outputs],
                start_s=start_s,
                compile_s=state.compile_s,
                num_compiles=state.num_compiles,
                memory=state.memory,
                against=against,
            )


def _compare(
    args: argparse.Namespace,
    config: ModelConfig,
    model: Any,
    ours: EnginePeer,
    workload: Workload,
) -> tuple[list[float], Comparison]:
    """Seconds of our runs, and the other sampler in turns with them."""
    from benchmarks.lib.measure import agreed_tokens, run_pairs, timed
    from benchmarks.lib.report import Comparison
    from benchmarks.lib.vanilla import VanillaPeer

    peer = VanillaPeer(model, config, workload, None)
    agreed, count = agreed_tokens(ours, peer, workload)
    if 0 in agreed:
        say(
            f"warning: {peer.name} has other first tokens ({agreed} of {count} leading greedy "
            "tokens agree): it computes another model, or a logit is nearly tied"
        )
    timed(peer, workload)  # compiles
    our_runs_s, runs_s = run_pairs(
        ours, peer, workload, args.repeats, lambda text: _tell(args, text)
    )
    return our_runs_s, Comparison(
        name=peer.name,
        runs_s=runs_s,
        ratios=[theirs / own for theirs, own in zip(runs_s, our_runs_s, strict=True)],
        num_agreed=sum(agreed),
        num_greedy=count * len(agreed),
    )


def _make_ours(
    args: argparse.Namespace,
    config: ModelConfig,
    folder: Path | None,
    model: Any,
    workload: Workload,
) -> EnginePeer:
    from benchmarks.lib.peers import EnginePeer, SglJaxPeer
    from sgljax_engine import Engine
    from tunix_sgljax.observability.progress import Progress

    if folder is None and model is not None:  # the same weights as the other sampler
        return SglJaxPeer(model, workload, options=read_pairs("--engine", args.engine))
    num_rows = workload.num_rows
    sizes = {"max_model_len": workload.max_model_len, "max_running_requests": num_rows}
    source: dict[str, Any] = {"model_config": config} if folder is None else {"model_path": folder}
    progress = Progress(False if args.quiet else None)
    options = engine_config(args, sizes)
    return EnginePeer(Engine(**source, config=options, progress=progress), num_rows)


def _tunix_model(args: argparse.Namespace, config: ModelConfig, folder: Path | None) -> Any:
    from benchmarks.lib.models import load_tunix_model, make_tunix_model
    from sgljax_engine import preview_engine

    dtype = preview_engine(config, folder=folder, config=engine_config(args)).dtype
    if folder is None:
        return make_tunix_model(config, dtype=dtype)
    return load_tunix_model(folder, dtype)


def _tell(args: argparse.Namespace, text: str) -> None:
    if not args.quiet:
        say(text)


def main(argv: list[str] | None = None) -> int:
    """Runs the command; see `tools.command`."""
    return command.main("benchmarks.bench", SUMMARY, EXAMPLES, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
