"""Our engine against llama.cpp on a CPU: same weights, same requests, the best settings for it.

    python benchmarks/throughput/llamacpp.py                     # small, about twenty minutes
    python benchmarks/throughput/llamacpp.py --quick             # a smoke test
    python benchmarks/throughput/llamacpp.py --peer-python /path/to/venv/bin/python

Needs `llama_cpp` (pip install llama-cpp-python, compiled for this machine), here or in the
environment of `--peer-python`; without it one line says so. With `--dtype int8` a build with AMX
crashes where the kernel does not let processes use it: compile without. Each side is a process of
its own, and is stopped while the other one runs.

Both decode greedily, so that sampling does not decide, and all requests are submitted at once; the
log-probs that our engine returns with each token are not asked of llama.cpp. How llama.cpp serves
the requests is in `benchmarks/lib/llamacpp_peer.py`. For each workload its settings are chosen
first: the fastest of all combinations of slots (as many as our engine's rows, a half, a quarter),
KV buffers and flash attention; then each of `CHANGES` is tried and kept where it is faster. Its KV
cache is float16, which was faster than float32; ours has the dtype of our weights.

Then greedy tokens are compared: those that follow equal tokens on both sides, since after the first
difference the two answer different questions. Runs are made in pairs whose order alternates. A pair
during which other processes kept more than a tenth of the machine busy is repeated; if too few
remain, the least disturbed ones are used, and the table says how many.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.lib.gguf_model import write_gguf
from benchmarks.lib.llamacpp_peer import Settings, serve
from benchmarks.lib.llamacpp_report import Pair, Result, report_lines
from benchmarks.lib.llamacpp_sides import (
    OUR_OPTIONS,
    OurSide,
    PeerProcesses,
    Run,
    Worker,
    is_disturbed,
    make_weights,
)
from benchmarks.lib.reporting import ROOT, report_head, write_report
from sgljax_engine import EngineConfig
from tunix_sgljax.bench.environment import describe_environment
from tunix_sgljax.bench.shapes import MODELS
from tunix_sgljax.bench.workloads import WORKLOADS, Workload, make_workload

DEFAULT_MODEL = "small"
DEFAULT_WORKLOADS = ("rl_longtail", "rl_uniform", "long_prompt", "single_stream")
CHANGES: tuple[Mapping[str, Any], ...] = (
    {"batch_tokens": 2048},
    {"waiting": "active"},
    {"waiting": "passive"},
)
"""Settings of llama.cpp that are tried after all combinations of the others."""

_NUM_CHECKED, _NUM_GREEDY_TOKENS = 8, 8
_LEAST_AGREED = 0.9
_TRIAL_S, _MAX_TRIAL_RUNS = 2.0, 3


def first_settings(num_rows: int) -> list[Settings]:
    """Combinations of slots, KV buffers and attention, for at most `num_rows` requests at once."""
    counts = dict.fromkeys(max(num_rows // part, 1) for part in (1, 2, 4))
    return [
        Settings(num_slots=num_slots, is_unified=is_unified, flash_attention=flash_attention)
        for num_slots in counts
        for is_unified in ((False, True) if num_slots > 1 else (False,))
        for flash_attention in (True, False)
    ]


def choose_settings(peers: PeerProcesses, workload: Workload) -> list[tuple[Settings, float]]:
    """Tries settings of llama.cpp; of short or disturbed runs, the best of three counts."""

    def seconds(settings: Settings) -> float:
        worker = peers.open(workload, settings)
        runs: list[Run] = []
        calm_s = 0.0
        while calm_s < _TRIAL_S and len(runs) < _MAX_TRIAL_RUNS:
            runs.append(worker.run(workload))
            calm_s += 0.0 if is_disturbed(runs[-1].other_load) else runs[-1].wall_s
        best_s = min(run.wall_s for run in runs)
        print(f"  {best_s:.3f} s with {settings.in_words()}", flush=True)
        return best_s

    firsts = first_settings(workload.num_rows)
    peers.open(workload, firsts[0]).run(workload)  # warms up
    trials = [(settings, seconds(settings)) for settings in firsts]
    for change in CHANGES:
        settings = dataclasses.replace(fastest(trials), **change)
        trials.append((settings, seconds(settings)))
    return trials


def fastest(trials: Sequence[tuple[Settings, float]]) -> Settings:
    """The settings with the least seconds."""
    return min(trials, key=lambda trial: trial[1])[0]


def count_agreed(ours: Worker, peer: Worker, workload: Workload) -> tuple[int, int]:
    """The number of greedy tokens that agree, and of those that follow equal tokens.

    A workload of few prompts is asked for the ends of one as well.
    """
    prompts = [list(prompt) for prompt in workload.prompts[:_NUM_CHECKED]]
    if len(prompts) < _NUM_CHECKED:
        prompts = [prompts[0][start:] for start in range(_NUM_CHECKED)]
    lengths = [min(_NUM_GREEDY_TOKENS, workload.max_output_len)] * len(prompts)
    outputs = [side.generate(prompts, lengths)[1] for side in (ours, peer)]
    return agreed_tokens(*outputs)


def agreed_tokens(ours: Sequence[list[int]], theirs: Sequence[list[int]]) -> tuple[int, int]:
    """The number of tokens before the first difference, and the same with the differing ones."""
    num_agreed = num_compared = 0
    for our_ids, their_ids in zip(ours, theirs, strict=True):
        same = [a == b for a, b in zip(our_ids, their_ids, strict=True)]
        leading = same.index(False) if False in same else len(same)
        num_agreed += leading
        num_compared += min(leading + 1, len(same))
    return num_agreed, num_compared


def measure_pairs(
    ours: Worker, peer: Worker, workload: Workload, num_pairs: int, max_pairs: int
) -> list[Pair]:
    """Makes pairs until enough are undisturbed, but at most `max_pairs`."""
    pairs: list[Pair] = []
    while sum(not is_disturbed(pair.other_load) for pair in pairs) < num_pairs:
        if len(pairs) == max_pairs:
            break
        sides = (ours, peer) if len(pairs) % 2 == 0 else (peer, ours)
        runs = {side: side.run(workload) for side in sides}
        pairs.append(Pair(ours=runs[ours], peer=runs[peer]))
        note = ", DISTURBED" if is_disturbed(pairs[-1].other_load) else ""
        print(
            f"  ours {runs[ours].wall_s:.3f} s, llama.cpp {runs[peer].wall_s:.3f} s, others' load "
            f"{pairs[-1].other_load:.1%}{note}",
            flush=True,
        )
    return pairs


def split_pairs(pairs: Sequence[Pair], num_pairs: int) -> tuple[list[Pair], list[Pair]]:
    """The pairs that count, and the others: undisturbed ones first, then by load."""
    order = sorted(
        range(len(pairs)),
        key=lambda i: (is_disturbed(pairs[i].other_load) and pairs[i].other_load, i),
    )
    used = set(order[:num_pairs])
    return (
        [pair for i, pair in enumerate(pairs) if i in used],
        [pair for i, pair in enumerate(pairs) if i not in used],
    )


def measure_workload(
    args: argparse.Namespace, ours: Worker, peers: PeerProcesses, workload: Workload
) -> Result:
    """Chooses the settings of llama.cpp, compares tokens and makes the pairs."""
    print(f"{workload.name}: {workload.useful_tokens} tokens", flush=True)
    trials = choose_settings(peers, workload)
    peer = peers.open(workload, fastest(trials))
    ours.call("open", max_model_len=workload.max_model_len, num_rows=workload.num_rows)
    num_agreed, num_compared = count_agreed(ours, peer, workload)
    print(f"  {num_agreed} of {num_compared} greedy tokens agree", flush=True)
    if args.dtype == "float32" and num_agreed < _LEAST_AGREED * num_compared:
        raise AssertionError(f"only {num_agreed} of {num_compared} greedy tokens agree")
    for side in (ours, peer):
        side.run(workload)  # warms up
    max_pairs = args.pairs if args.quick else 2 * args.pairs
    pairs = measure_pairs(ours, peer, workload, args.pairs, max_pairs)
    used, left_out = split_pairs(pairs, args.pairs)
    return Result(
        workload=workload.name,
        useful_tokens=workload.useful_tokens,
        trials=trials,
        settings=fastest(trials),
        num_agreed=num_agreed,
        num_compared=num_compared,
        used=used,
        left_out=left_out,
    )


@contextlib.contextmanager
def started(args: argparse.Namespace) -> Iterator[tuple[Worker, PeerProcesses, dict[str, Any]]]:
    """Both sides with the same weights, and what llama.cpp says of itself."""
    config = MODELS[args.model].config
    with contextlib.ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model.gguf"
        write_gguf(path, config, make_weights(config).arrays, args.dtype)
        command = [sys.executable, __file__, "--serve", "--model", args.model]
        ours = Worker([*command, "--dtype", args.dtype])
        stack.callback(ours.close)
        peers = PeerProcesses(args.peer_python, path, stack)
        yield ours, peers, peers.get("default").call("describe")


def missing_reason(args: argparse.Namespace) -> str | None:
    """Why there is no comparison; None if there is one."""
    imports = [args.peer_python, "-c", "import llama_cpp, numpy"]
    try:
        found = subprocess.run(imports, capture_output=True, check=False)
    except OSError as error:
        return f"{args.peer_python} does not run: {error}"
    if found.returncode:
        return f"{args.peer_python} cannot import llama_cpp (pip install llama-cpp-python)"
    unknown = set(OUR_OPTIONS[args.dtype]) - set(EngineConfig.option_names())
    return f"the engine has no option {', '.join(unknown)} yet" if unknown else None


def default_output(args: argparse.Namespace) -> Path:
    """A file of its own for each model and dtype."""
    parts = ["llamacpp"]
    parts += [args.model] if args.model != DEFAULT_MODEL else []
    parts += [args.dtype] if args.dtype != "float32" else []
    folder = "outputs/bench_quick" if args.quick else "benchmarks/results"
    return ROOT / folder / f"{'_'.join(parts)}.md"


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the options."""
    parser = argparse.ArgumentParser(description="Our engine against llama.cpp.")
    parser.add_argument("--model", choices=list(MODELS), default=DEFAULT_MODEL)
    parser.add_argument("--dtype", choices=list(OUR_OPTIONS), default="float32")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=DEFAULT_WORKLOADS)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="tiny workloads, for a smoke test")
    parser.add_argument("--peer-python", default=sys.executable, help="one that has llama_cpp")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/llamacpp.md")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def command_in_words(args: argparse.Namespace) -> str:
    """The command with the options that matter; paths are those of one machine."""
    options = ["--model", args.model, "--dtype", args.dtype, "--pairs", str(args.pairs)]
    options += ["--quick"] * args.quick + ["--workloads", *args.workloads]
    return shlex.join(["python", "benchmarks/throughput/llamacpp.py", *options])


def compare(args: argparse.Namespace) -> None:
    """Measures and writes the results."""
    config = MODELS[args.model].config
    results: list[Result] = []
    with started(args) as (ours, peers, facts):
        for name in args.workloads:
            workload = make_workload(name, config.vocab_size, is_quick=args.quick)
            results.append(measure_workload(args, ours, peers, workload))
            print(results[-1].row(), flush=True)
    environment = describe_environment(jax.devices()[0].device_kind)
    command = command_in_words(args)
    head = report_head("Our engine against llama.cpp", command, environment)[:-1]
    content = {
        "command": command,
        "model": args.model,
        "dtype": args.dtype,
        "llama_cpp": facts,
        "results": [
            {**dataclasses.asdict(r), "ratios": [pair.ratio for pair in r.used]} for r in results
        ],
    }
    lines = [*head, *report_lines(args, facts, results)]
    write_report(args.output or default_output(args), lines, environment, content)


def main(argv: Sequence[str]) -> None:
    """Serves our engine, or compares."""
    args = parse_args(argv)
    if args.serve:
        side = OurSide(args.model, args.dtype)
        serve({"open": side.open, "run": side.run})
        return
    reason = missing_reason(args)
    if reason is not None:
        print(f"no comparison with llama.cpp: {reason}")
        return
    compare(args)


if __name__ == "__main__":
    main(sys.argv[1:])
