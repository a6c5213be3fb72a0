"""Start-up of one peer in a process of its own, with an empty and with a filled compile cache.

    python benchmarks/start_up/cold_start.py --peer sgljax --model tiny --cache-dir /tmp/empty

The clock starts when imports are done and the trainer's weights are in memory, and stops when
every request of the workload has its first token and all programs that the workload needs are
compiled. The persistent cache is JAX's, with the same settings for each peer. With `--with-run` the
workload then runs in full, so that the peak of memory is that of real work.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from benchmarks.lib.batch_peers import TRANSFORMERS
from benchmarks.lib.peers import PeerFactory
from tunix_sgljax.bench.models import make_tunix_model
from tunix_sgljax.bench.peers import OURS
from tunix_sgljax.bench.shapes import MODELS
from tunix_sgljax.bench.workloads import WORKLOADS, make_workload

_COMPILE_EVENTS = (
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)
_LINE = "cold_start: "
_CLEAR_PEAK = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """One start of one peer.

    Attributes:
        peer: Its name.
        is_warm: The compile cache held what an earlier start put there.
        start_s: Seconds from weights in memory to first tokens of all requests.
        compile_s: Seconds of lowering and compiling, or of reading the cache instead, in that
            time; of all threads together.
        weights_bytes: Resident memory of the process before the peer was made.
        peak_bytes: The largest from then on.
    """

    peer: str
    is_warm: bool
    start_s: float
    compile_s: float
    weights_bytes: int
    peak_bytes: int


def _status_bytes(field: str) -> int | None:
    """A field of the kernel's description of this process; None where there is none."""
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return None


def _peak_bytes() -> int:
    """The largest resident size so far, or since `_reset_peak` where that works."""
    peak = _status_bytes("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if peak is None else peak


def _reset_peak() -> None:
    """Forgets the peak of making the weights, where the kernel can (Linux)."""
    if _CLEAR_PEAK.exists():
        _CLEAR_PEAK.write_text("5")


@contextlib.contextmanager
def _recorded_compiles() -> Iterator[list[float]]:
    """Collects the seconds of lowering and compiling, or reading the cache, of all threads."""
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event in _COMPILE_EVENTS:
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def use_cache(folder: Path) -> None:
    """Points JAX's persistent compilation cache to a folder; everything goes in."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def measure_start(
    peer: str, model: str, workload_name: str, *, is_quick: bool, is_warm: bool, with_run: bool
) -> Start:
    """Starts one peer in this process."""
    bench_model = MODELS[model]
    workload = make_workload(workload_name, bench_model.config.vocab_size, is_quick=is_quick)
    weights = make_tunix_model(bench_model.config)
    if peer == TRANSFORMERS:
        importlib.import_module("torch")
        importlib.import_module("transformers.models.qwen3.modeling_qwen3")
    _reset_peak()
    weights_bytes = _status_bytes("VmRSS") or _peak_bytes()
    with _recorded_compiles() as compile_s:
        started = time.perf_counter()
        running = PeerFactory(weights, bench_model).make(peer, workload)
        running.start(workload)
        start_s = time.perf_counter() - started
    if with_run:
        running.generate(workload)
    # The kernel counts in batches, so the two numbers may cross by a little.
    peak_bytes = max(_peak_bytes(), weights_bytes)
    running.close()
    return Start(
        peer=peer,
        is_warm=is_warm,
        start_s=start_s,
        compile_s=sum(compile_s),
        weights_bytes=weights_bytes,
        peak_bytes=peak_bytes,
    )


def run_starts(
    peers: Sequence[str], model: str, workload: str, *, is_quick: bool = False
) -> list[Start]:
    """A cold and a warm start of each peer, each in a child process, with a cache of its own.

    Raises:
        subprocess.CalledProcessError: a child failed.
    """
    starts: list[Start] = []
    for peer in peers:
        with tempfile.TemporaryDirectory() as folder:
            for is_warm in (False, True):
                command = [sys.executable, __file__, "--peer", peer, "--model", model]
                command += ["--workload", workload, "--cache-dir", folder]
                command += ["--is-warm", "--with-run"] if is_warm else []
                command += ["--quick"] if is_quick else []
                child = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                lines = [line for line in child.stdout.splitlines() if line.startswith(_LINE)]
                starts.append(Start(**json.loads(lines[-1].removeprefix(_LINE))))
                print(f"  {lines[-1]}", flush=True)
    return starts


def format_starts(starts: Sequence[Start], workload: str) -> list[str]:
    """A table in Markdown."""
    lines = [
        f"## Start-up and memory: `{workload}`",
        "",
        "| peer | cold start, s | of it compiling, s | warm start, s | of it compiling, s "
        "| warm / cold | peak memory, MB | trainer's weights and imports alone, MB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for cold in (start for start in starts if not start.is_warm):
        warm = next(start for start in starts if start.is_warm and start.peer == cold.peer)
        lines.append(
            f"| {cold.peer} | {cold.start_s:.1f} | {cold.compile_s:.1f} | {warm.start_s:.1f} "
            f"| {warm.compile_s:.1f} | {warm.start_s / cold.start_s:.0%} "
            f"| {warm.peak_bytes / 1e6:.0f} | {warm.weights_bytes / 1e6:.0f} |"
        )
    return [*lines, ""]


def main() -> None:
    """Starts one peer and prints what it took as a line of JSON."""
    parser = argparse.ArgumentParser(description="Start-up of one peer.")
    parser.add_argument("--peer", default=OURS)
    parser.add_argument("--model", choices=list(MODELS), default="small")
    parser.add_argument("--workload", choices=WORKLOADS, default="rl_longtail")
    parser.add_argument("--cache-dir", type=Path, required=True)
    parser.add_argument("--is-warm", action="store_true", help="how to label the result")
    parser.add_argument("--with-run", action="store_true", help="run the workload after the start")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    use_cache(args.cache_dir)
    start = measure_start(
        args.peer,
        args.model,
        args.workload,
        is_quick=args.quick,
        is_warm=args.is_warm,
        with_run=args.with_run,
    )
    print(_LINE + json.dumps(dataclasses.asdict(start)))


if __name__ == "__main__":
    main()
