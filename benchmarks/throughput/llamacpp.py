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
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.lib.gguf_model import STORED_TYPES, write_gguf
from benchmarks.lib.llamacpp_peer import Clock, Settings, serve
from benchmarks.lib.reporting import ROOT, report_head, write_report
from sgljax_engine import Engine, EngineConfig, ModelConfig, SamplingParams
from sgljax_engine.builder.sources import dummy_weights
from sgljax_engine.core.weight_updates import WeightSource
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
LOAD_LIMIT = 0.1
"""Fraction of the machine that other processes may keep busy during a pair."""
OUR_OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
}

_NUM_CHECKED, _NUM_GREEDY_TOKENS = 8, 8
_LEAST_AGREED = 0.9
_PEER_SCRIPT = ROOT / "benchmarks/lib/llamacpp_peer.py"
_SEED = 0
_SETTLE_S = 0.2
_TRIAL_S, _MAX_TRIAL_RUNS = 2.0, 3
_WAIT_VARIABLE = "OMP_WAIT_POLICY"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One run of one side.

    Attributes:
        wall_s: Seconds of the call.
        cpu_s: CPU seconds of its process meanwhile.
        other_load: Fraction of the machine that other processes kept busy; None if unknown.
    """

    wall_s: float
    cpu_s: float
    other_load: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """One run of each side, one right after the other."""

    ours: Run
    peer: Run

    @property
    def ratio(self) -> float:
        """Our speed over llama.cpp's."""
        return self.peer.wall_s / self.ours.wall_s

    @property
    def other_load(self) -> float:
        """The larger load of other processes."""
        return max(self.ours.other_load or 0.0, self.peer.other_load or 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One workload.

    Attributes:
        workload: Its name.
        useful_tokens: Tokens of a run.
        trials: Settings of llama.cpp that were tried, with their seconds, in order.
        settings: The fastest of them.
        num_agreed: Greedy tokens that agree.
        num_compared: Greedy tokens that follow equal tokens.
        used: Pairs in the table.
        left_out: Pairs that other processes disturbed more.
    """

    workload: str
    useful_tokens: int
    trials: list[tuple[Settings, float]]
    settings: Settings
    num_agreed: int
    num_compared: int
    used: list[Pair]
    left_out: list[Pair]

    def row(self) -> str:
        """A line of the table."""
        ratios = [pair.ratio for pair in self.used]
        ours, peer = ([getattr(pair, side) for pair in self.used] for side in ("ours", "peer"))
        cells = [
            self.workload,
            *(f"{np.median([run.wall_s for run in runs]):.3f}" for runs in (ours, peer)),
            f"{np.median(ratios):.3f}",
            f"{min(ratios):.3f} to {max(ratios):.3f}",
            *(f"{np.median([run.cpu_s for run in runs]):.3f}" for runs in (ours, peer)),
            f"{max(pair.other_load for pair in self.used):.1%}",
            f"{len(self.used)}, {sum(is_disturbed(pair.other_load) for pair in self.used)}",
            f"{self.num_agreed} of {self.num_compared}",
        ]
        return f"| {' | '.join(cells)} |"


HEAD = (
    "| workload | ours, s | llama.cpp, s | our speed over llama.cpp's, median pair | smallest to "
    "largest | CPU, ours, s | CPU, llama.cpp, s | largest load of others | pairs, disturbed ones "
    "| greedy tokens that agree |",
    "|---|---:|---:|---:|---|---:|---:|---:|---|---|",
)


class Worker:
    """A process that answers commands (`serve`); it is stopped between them."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        """Starts the process.

        Args:
            command: What it runs.
            variables: Additional environment variables.
        """
        environment = {k: v for k, v in os.environ.items() if k != _WAIT_VARIABLE}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | dict(variables or {}),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._commands, self._answers = self._process.stdin, self._process.stdout

    def close(self) -> None:
        """Ends the process."""
        self._process.send_signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._commands.close()
        self._process.wait()
        self._answers.close()

    def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Sends a command and returns the answer.

        Raises:
            RuntimeError: the worker failed; the message is its own.
        """
        self._process.send_signal(signal.SIGCONT)
        time.sleep(_SETTLE_S)
        print(json.dumps({"command": command, **arguments}), file=self._commands, flush=True)
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"a worker ended with {self._process.wait()} at {command}")
        self._process.send_signal(signal.SIGSTOP)
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"a worker failed at {command}: {answer['error']}")
        return answer

    def generate(self, requests: Sequence[Sequence[int]], lengths: Sequence[int]) -> Any:
        """Answers requests; returns the run and the tokens of each."""
        answer = self.call("run", prompts=requests, lengths=lengths)
        outputs = answer.pop("outputs")
        if tuple(map(len, outputs)) != tuple(lengths):
            raise AssertionError(f"answered {[*map(len, outputs)]} tokens, not {lengths}")
        return Run(**answer), outputs

    def run(self, workload: Workload) -> Run:
        """Answers a workload."""
        return self.generate(workload.requests, workload.output_lengths)[0]


class OurSide:
    """The commands of our engine's process."""

    def __init__(self, model: str, dtype: str) -> None:
        """Makes the weights."""
        self._config, self._dtype = MODELS[model].config, dtype
        self._source = make_weights(self._config)
        self._engine: Engine | None = None

    def open(self, max_model_len: int, num_rows: int) -> dict[str, Any]:
        """Makes an engine in place of the last one and compiles it."""
        if self._engine is not None:
            self._engine.shutdown()
        self._engine = Engine(
            model_config=self._config,
            weights=self._source.arrays,
            weight_rules=self._source.rules,
            max_model_len=max_model_len,
            max_running_requests=num_rows,
            **OUR_OPTIONS[self._dtype],
        )
        self._engine.warmup()
        return {}

    def run(self, prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
        """Answers requests greedily, from an empty prefix cache."""
        assert self._engine is not None
        params = [
            SamplingParams(temperature=0.0, max_new_tokens=length, ignore_eos=True)
            for length in lengths
        ]
        self._engine.flush_cache()
        clock = Clock()
        outputs = self._engine.generate_requests(prompts, params)
        return clock.read() | {"outputs": [output.output_ids for output in outputs]}


def is_disturbed(other_load: float | None) -> bool:
    """Whether other processes kept too much of the machine busy."""
    return other_load is not None and other_load > LOAD_LIMIT


def make_weights(config: ModelConfig) -> WeightSource:
    """Random weights of a seed; projections keep the size of what they multiply.

    With the smaller ones of `load_format="dummy"` a greedy answer repeats one token.
    """
    source = dummy_weights(config, _SEED)
    arrays = {
        name: array * np.float32(array.shape[0] ** -0.5 / array.std())
        if name.endswith("_proj.weight")
        else array
        for name, array in source.arrays.items()
    }
    return WeightSource(arrays, source.rules)


class PeerProcesses:
    """Processes of llama.cpp, one for each waiting mode, which a process cannot change."""

    def __init__(self, python: str, path: Path, stack: contextlib.ExitStack) -> None:
        """Starts none yet; the stack ends them."""
        self._command, self._stack = [python, str(_PEER_SCRIPT), str(path)], stack
        self._workers: dict[str, Worker] = {}

    def get(self, waiting: str) -> Worker:
        """The process of a waiting mode."""
        if waiting not in self._workers:
            variables = {} if waiting == "default" else {_WAIT_VARIABLE: waiting}
            self._workers[waiting] = Worker(self._command, variables)
            self._stack.callback(self._workers[waiting].close)
        return self._workers[waiting]

    def open(self, workload: Workload, settings: Settings) -> Worker:
        """The process of the settings' waiting mode, ready for a workload."""
        worker = self.get(settings.waiting)
        options = dataclasses.asdict(settings)
        worker.call("open", max_model_len=workload.max_model_len, settings=options)
        return worker


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


def report_lines(
    args: argparse.Namespace, facts: Mapping[str, Any], results: Sequence[Result]
) -> list[str]:
    """The tables: results, then the settings that were tried."""
    lines = [*HEAD, *(result.row() for result in results), ""]
    lines += ["## Settings of llama.cpp", ""]
    lines += ["Seconds of one run; of short or disturbed ones, the best of three.", ""]
    lines += ["| workload | settings | s | |", "|---|---|---:|---|"]
    for result in results:
        for settings, seconds in result.trials:
            mark = "chosen" if settings == result.settings else ""
            lines.append(f"| {result.workload} | {settings.in_words()} | {seconds:.3f} | {mark} |")
    stored = STORED_TYPES[args.dtype]
    return [
        f"- llama.cpp: llama-cpp-python {facts['version']}, {facts['system'].strip(' |')}; "
        f"weights in {stored}, KV cache in float16",
        f"- Ours: {OUR_OPTIONS[args.dtype]}, the other options at their defaults",
        f"- Model: {MODELS[args.model].in_words}, random weights; greedy on both sides",
        *(["- Quick sizes: no result"] if args.quick else []),
        "",
        *lines,
    ]


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
