"""How long a pause takes while an engine is busy.

    python benchmarks/interruption/interruptions.py            # about 2 minutes on 2 cores
    python benchmarks/interruption/interruptions.py --quick    # a smoke test

How long `pause_generation` takes at random moments while 64 requests decode, beside the dispatches
of the same run, none of which can be cut short: by default, and with a `max_dispatch_s` that most
dispatches fill.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.lib.reporting import make_parser, output_dir, write_results
from benchmarks.lib.shapes import MODELS
from sgljax_engine import Engine, EngineShutdownError, SamplingParams, SchedulerConfig
from sgljax_engine.io_struct import PauseMode

MODES: tuple[PauseMode, ...] = ("retract", "in_place")
MAX_DISPATCHES_S = (SchedulerConfig().max_dispatch_s, 0.1)
"""The default; then one that is shorter than the time between two requests that finish, which end a
dispatch early when others wait."""

WAIT_S = 120
"""Longer than anything here takes."""


class Sizes(NamedTuple):
    """Requests that run, their most tokens, and pauses of each mode."""

    num_rows: int
    max_prompt: int
    max_new: int
    num_pauses: int


FULL = Sizes(num_rows=64, max_prompt=64, max_new=512, num_pauses=100)
QUICK = Sizes(num_rows=8, max_prompt=16, max_new=256, num_pauses=3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latencies:
    """Pauses of one mode.

    Attributes:
        mode: Of the pauses.
        max_dispatch_s: Of the engine.
        pauses_s: Seconds of each `pause_generation`, in order.
        dispatches_s: Seconds of each dispatch that ran to its end meanwhile, in order.
    """

    mode: PauseMode
    max_dispatch_s: float
    pauses_s: list[float]
    dispatches_s: list[float]


class Load:
    """More threads than rows, each generating one request after another until it is closed.

    So others wait for the place of one that ends, and the batch stays full.
    """

    def __init__(self, engine: Engine, sizes: Sizes) -> None:
        self.engine = engine
        self._sizes = sizes
        self._failures: list[Exception] = []
        self._is_over = False
        for seed in range(sizes.num_rows + sizes.num_rows // 4):
            threading.Thread(target=self._generate, args=(seed,), daemon=True).start()

    def _generate(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        vocab_size, max_new = self.engine.model_config.vocab_size, self._sizes.max_new
        try:
            while not self._is_over:
                length = rng.integers(8, self._sizes.max_prompt + 1)
                params = SamplingParams(
                    max_new_tokens=int(rng.integers(max_new // 2, max_new + 1)), ignore_eos=True
                )
                self.engine.generate_requests(
                    [rng.integers(1, vocab_size, length).tolist()], params
                )
        except EngineShutdownError:
            return
        except Exception as error:
            self._failures.append(error)

    def wait_until_full(self) -> None:
        """Until nearly all rows decode: some have ended at any time between two dispatches."""
        deadline = time.monotonic() + WAIT_S
        while True:
            state = self.engine.get_internal_state()
            is_full = state.running_batch_size >= 0.75 * self._sizes.num_rows
            if is_full and not state.num_prefilling:
                return
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{state.running_batch_size} rows run")

    def check(self) -> None:
        """Raises what a request failed with."""
        if self._failures:
            raise self._failures[0]

    def close(self) -> None:
        """The engine is shut down; every thread ends with its request."""
        self._is_over = True
        self.check()


@contextlib.contextmanager
def loaded_engine(model: str, sizes: Sizes, max_dispatch_s: float) -> Iterator[Load]:
    """Requests that keep an engine's rows busy."""
    engine = Engine(
        model_config=MODELS[model].config,
        load_format="dummy",
        max_running_requests=sizes.num_rows,
        batch_buckets=(sizes.num_rows,),  # which are always full
        max_model_len=sizes.max_prompt + sizes.max_new,
        max_dispatch_s=max_dispatch_s,
    )
    with engine:
        engine.warmup()
        load = Load(engine, sizes)
        yield load
    load.close()


@contextlib.contextmanager
def timed_dispatches(engine: Engine) -> Iterator[list[float]]:
    """Collects the seconds of every dispatch, host work included."""
    core: Any = engine._group.loops[0]._core
    real, durations = core.step, []

    def step() -> None:
        start = time.perf_counter()
        real()
        durations.append(time.perf_counter() - start)

    core.step = step
    try:
        yield durations
    finally:
        core.step = real


def measure_latencies(load: Load, mode: PauseMode, count: int, max_dispatch_s: float) -> Latencies:
    """Pauses at random moments: after a time of up to two dispatches without a pause.

    Args:
        load: Of the engine that is paused.
        mode: Of the pauses.
        count: Of pauses.
        max_dispatch_s: Of the engine.
    """
    rng, engine = np.random.default_rng(0), load.engine
    pauses_s: list[float] = []
    load.wait_until_full()
    with timed_dispatches(engine) as durations:
        deadline = time.monotonic() + WAIT_S
        while len(durations) < 4 and time.monotonic() < deadline:
            engine.get_internal_state()
        for _ in range(count):
            time.sleep(rng.uniform(0, 2 * float(np.median(durations))))
            start = time.perf_counter()
            engine.pause_generation(mode)
            pauses_s.append(time.perf_counter() - start)
            engine.continue_generation()
            load.check()
    return Latencies(
        mode=mode, max_dispatch_s=max_dispatch_s, pauses_s=pauses_s, dispatches_s=durations
    )


def report(latencies: Sequence[Latencies]) -> list[str]:
    """The table in Markdown."""
    lines = [
        "From the call to its return, at random moments, in ms and in median dispatches of the "
        "same run. `max_dispatch_s` is what dispatches aim at; they end before that when a request "
        "finishes, since others wait for its place.",
        "",
        "| `max_dispatch_s` | mode | pauses | | median | p90 | p99 | max | dispatch: median "
        "| max |",
        "|---|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for each in latencies:
        typical_s = float(np.median(each.dispatches_s))
        for unit, scale in (("ms", 1e3), ("dispatches", 1 / typical_s)):
            values = [*np.percentile(each.pauses_s, (50, 90, 99, 100)), typical_s]
            cells = [f"{scale * value:.2f}" for value in (*values, max(each.dispatches_s))]
            lines.append(
                f"| {each.max_dispatch_s:g} s | {each.mode} | {len(each.pauses_s)} | {unit} "
                f"| {' | '.join(cells)} |"
            )
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Measures all and writes the results."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="tiny", help="that is paused")
    args = parser.parse_args(argv)
    sizes = QUICK if args.quick else FULL
    latencies: list[Latencies] = []
    for max_dispatch_s in MAX_DISPATCHES_S:
        with loaded_engine(args.model, sizes, max_dispatch_s) as load:
            latencies += [
                measure_latencies(load, mode, sizes.num_pauses, max_dispatch_s) for mode in MODES
            ]
    write_results(
        output_dir(args) / "interruptions.md",
        "Interruptions",
        "benchmarks/interruption/interruptions.py",
        report(latencies),
        {"model": args.model, "latencies": [dataclasses.asdict(each) for each in latencies]},
        facts=[
            f"{MODELS[args.model].in_words}, float32; {sizes.num_rows} requests of up to "
            f"{sizes.max_prompt} + {sizes.max_new} tokens, engine defaults but `max_dispatch_s`"
        ],
    )


if __name__ == "__main__":
    main()
