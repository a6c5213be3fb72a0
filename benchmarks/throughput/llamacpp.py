"""Our engine against llama.cpp on a CPU: same weights, same requests, the best settings for it.

    python benchmarks/throughput/llamacpp.py                     # small, about fifteen minutes
    python benchmarks/throughput/llamacpp.py --quick             # a smoke test
    python benchmarks/throughput/llamacpp.py --peer-python /path/to/venv/bin/python

A run of a model and a dtype is added to those of earlier ones.

Needs `llama_cpp` (pip install llama-cpp-python, compiled for this machine), here or in the
environment of `--peer-python`; without it one line says so. With `--dtype int8` a build with AMX
crashes where the kernel does not let processes use it: compile without. Each side is a process of
its own, and is stopped while the other one runs.

Both decode greedily, so that sampling does not decide, and all requests are submitted at once; the
log-probs that our engine returns with each token are not asked of llama.cpp. How llama.cpp serves
the requests is in `benchmarks/lib/llamacpp_peer.py`. For each workload its settings are chosen
first: the fastest of all combinations of slots (as many as our engine's rows, a half, a quarter),
KV buffers and flash attention; then larger batches are tried. Its KV cache is float16, which was
faster than float32; ours has the dtype of our weights.

Then greedy tokens that follow equal ones are compared. The order within a pair of runs alternates.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.gguf_model import STORED_TYPES, write_gguf
from benchmarks.lib.llamacpp_peer import Settings, serve
from benchmarks.lib.llamacpp_sides import OUR_OPTIONS, OurSide, Worker, make_weights
from benchmarks.lib.reporting import ROOT, make_parser, output_dir, read_results, write_results
from benchmarks.lib.shapes import MODELS
from benchmarks.lib.turns import speed_table, take_turns
from benchmarks.lib.workloads import WORKLOADS, Workload, make_workload

DEFAULT_MODEL = "small"
DEFAULT_WORKLOADS = ("rl_longtail", "rl_uniform", "long_prompt", "single_stream")
PEER = "llama.cpp"
LARGE_BATCH_TOKENS = 2048

_PEER_SCRIPT = ROOT / "benchmarks/lib/llamacpp_peer.py"
_NUM_CHECKED, _NUM_GREEDY_TOKENS = 8, 8
_LEAST_AGREED = 0.9
_NUM_TRIAL_RUNS = 2

Trials = list[tuple[Settings, float]]
"""Settings that were tried, with the seconds of the best run."""


def first_settings(num_rows: int) -> list[Settings]:
    """Combinations of slots, KV buffers and attention, for at most `num_rows` requests at once."""
    counts = dict.fromkeys(max(num_rows // part, 1) for part in (1, 2, 4))
    return [
        Settings(num_slots=num_slots, is_unified=is_unified, flash_attention=flash_attention)
        for num_slots in counts
        for is_unified in ((False, True) if num_slots > 1 else (False,))
        for flash_attention in (True, False)
    ]


def open_peer(peer: Worker, workload: Workload, settings: Settings) -> None:
    """Makes llama.cpp ready for a workload."""
    options = dataclasses.asdict(settings)
    peer.call("open", max_model_len=workload.max_model_len, settings=options)


def choose_settings(peer: Worker, workload: Workload) -> Trials:
    """Tries settings of llama.cpp, and leaves the fastest ones open."""
    trials: Trials = []

    def attempt(settings: Settings) -> None:
        open_peer(peer, workload, settings)
        times: list[float] = []
        for _ in range(_NUM_TRIAL_RUNS):
            start = time.perf_counter()
            peer.run(workload.requests, workload.output_lengths)
            times.append(time.perf_counter() - start)
        trials.append((settings, min(times)))
        print(f"  {min(times):.3f} s with {settings.in_words()}", flush=True)

    for settings in first_settings(workload.num_rows):
        attempt(settings)
    attempt(dataclasses.replace(fastest(trials), batch_tokens=LARGE_BATCH_TOKENS))
    open_peer(peer, workload, fastest(trials))
    return trials


def fastest(trials: Trials) -> Settings:
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
    return agreed_tokens(*(side.run(prompts, lengths) for side in (ours, peer)))


def agreed_tokens(ours: Sequence[list[int]], theirs: Sequence[list[int]]) -> tuple[int, int]:
    """The number of tokens before the first difference, and the same with the differing ones."""
    num_agreed = num_compared = 0
    for our_ids, their_ids in zip(ours, theirs, strict=True):
        same = [a == b for a, b in zip(our_ids, their_ids, strict=True)]
        leading = same.index(False) if False in same else len(same)
        num_agreed += leading
        num_compared += min(leading + 1, len(same))
    return num_agreed, num_compared


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One workload: settings tried, greedy tokens that agree of those compared, seconds by side."""

    trials: Trials
    num_agreed: int
    num_compared: int
    seconds: dict[str, list[float]]


def measure_workload(
    args: argparse.Namespace, ours: Worker, peer: Worker, workload: Workload
) -> Result:
    """Chooses the settings of llama.cpp, compares tokens and makes the pairs."""
    print(f"{workload.name}: {workload.useful_tokens} tokens", flush=True)
    trials = choose_settings(peer, workload)
    ours.call("open", max_model_len=workload.max_model_len, num_rows=workload.num_rows)
    num_agreed, num_compared = count_agreed(ours, peer, workload)
    print(f"  {num_agreed} of {num_compared} greedy tokens agree", flush=True)
    if args.dtype == "float32" and num_agreed < _LEAST_AGREED * num_compared:
        raise AssertionError(f"only {num_agreed} of {num_compared} greedy tokens agree")
    runs = {
        name: lambda side=side: side.run(workload.requests, workload.output_lengths)
        for name, side in ((PEER, peer), ("ours", ours))
    }
    seconds = take_turns(runs, args.pairs)
    return Result(trials=trials, num_agreed=num_agreed, num_compared=num_compared, seconds=seconds)


@contextlib.contextmanager
def started(args: argparse.Namespace) -> Iterator[tuple[Worker, Worker]]:
    """Both sides with the same weights."""
    config = MODELS[args.model].config
    with contextlib.ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model.gguf"
        write_gguf(path, config, make_weights(config).arrays, args.dtype)
        options = ["--serve", "--model", args.model, "--dtype", args.dtype]
        ours = Worker([sys.executable, __file__, *options])
        stack.callback(ours.close)
        peer = Worker([args.peer_python, str(_PEER_SCRIPT), str(path)])
        stack.callback(peer.close)
        yield ours, peer


def missing_reason(peer_python: str) -> str | None:
    """Why there is no comparison; None if there is one."""
    imports = [peer_python, "-c", "import llama_cpp, numpy"]
    try:
        found = subprocess.run(imports, capture_output=True, check=False)
    except OSError as error:
        return f"{peer_python} does not run: {error}"
    if found.returncode:
        return f"{peer_python} cannot import llama_cpp (pip install llama-cpp-python)"
    return None


def report_lines(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Tables of all runs, by model and dtype: speeds, then the settings that were chosen."""
    seconds = {
        f"{run}: {name}": each["seconds"]
        for run, found in runs.items()
        for name, each in found["results"].items()
    }
    lines = speed_table(seconds, PEER)
    lines += ["", "| run | chosen settings of llama.cpp | tried | greedy tokens that agree |"]
    lines += ["|---|---|---:|---:|"]
    for run, found in runs.items():
        for name, each in found["results"].items():
            trials = [(Settings(**settings), took_s) for settings, took_s in each["trials"]]
            lines.append(
                f"| {run}: {name} | {fastest(trials).in_words()} | {len(trials)} "
                f"| {each['num_agreed']} of {each['num_compared']} |"
            )
    return lines


def compare(args: argparse.Namespace) -> None:
    """Measures, and adds what it found to the results."""
    config = MODELS[args.model].config
    results: dict[str, Any] = {}
    with started(args) as (ours, peer):
        facts = peer.call("describe")
        for name in args.workloads:
            workload = make_workload(name, config.vocab_size, is_quick=args.quick)
            result = measure_workload(args, ours, peer, workload)
            results[name] = dataclasses.asdict(result)
    output = output_dir(args) / "llamacpp.md"
    runs = read_results(output).get("runs", {})
    build = f"llama-cpp-python {facts['version']}, {facts['system'].strip(' |')}"
    runs[f"{args.model}, {args.dtype}"] = {"build": build, "results": results}
    write_results(
        output,
        "Our engine against llama.cpp",
        "benchmarks/throughput/llamacpp.py",
        report_lines(runs),
        {"runs": runs},
        facts=report_facts(runs),
    )


def report_facts(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The models and the builds of llama.cpp."""
    names = dict.fromkeys(run.partition(",")[0] for run in runs)
    stored = ", ".join(f"{kind.name} for {dtype}" for dtype, kind in STORED_TYPES.items())
    return [
        *(f"{name}: {MODELS[name].in_words}, random weights" for name in names),
        *dict.fromkeys(found["build"] for found in runs.values()),
        f"llama.cpp's weights: {stored}; its KV cache in float16. Both decode greedily",
    ]


def main(argv: Sequence[str]) -> None:
    """Serves our engine, or compares."""
    parser = make_parser(__doc__, pairs=5)
    parser.add_argument("--model", choices=list(MODELS), default=DEFAULT_MODEL)
    parser.add_argument("--dtype", choices=list(OUR_OPTIONS), default="float32")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=DEFAULT_WORKLOADS)
    parser.add_argument("--peer-python", default=sys.executable, help="one that has llama_cpp")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        side = OurSide(args.model, args.dtype)
        serve({"open": side.open, "run": side.run})
        return
    reason = missing_reason(args.peer_python)
    if reason is not None:
        print(f"no comparison with llama.cpp: {reason}")
        return
    compare(args)


if __name__ == "__main__":
    main(sys.argv[1:])
