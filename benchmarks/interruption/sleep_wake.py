"""Sleep, wake and checkpoints: seconds, bytes, and what they spare.

    python benchmarks/interruption/sleep_wake.py            # small, about 6 minutes on 2 cores
    python benchmarks/interruption/sleep_wake.py --quick    # tiny, a smoke test

- 64 requests of 1,000 tokens are put to sleep while they decode and are woken again; times are
  compared with copying the same bytes into memory that the process has just got, as sleep and wake
  do.
- Until each request has its next token: woken with its pages, against prefilled again. The two
  alternate.
- Checkpoints of the same requests: bytes, seconds, and how long decoding stands still for them.
"""

from __future__ import annotations

import dataclasses
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.reporting import make_parser, output_dir, write_results
from benchmarks.lib.shapes import MODELS
from sgljax_engine import Engine, EngineShutdownError, SamplingParams

WAIT_S = 300
"""Longer than anything here takes."""

COOLING_S = 5
"""Between two copies into fresh memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cycle:
    """One sleep and the wake after it.

    Attributes:
        is_preserved: Whether KV pages were kept.
        sleep_s, wake_s: Seconds of the engine thread; not those of the dispatch under way.
        first_tokens_s: From the call of wake until each request had a token more.
        num_tokens: Made in that time: requests that are prefilled first go on meanwhile.
        host_bytes: Copied to the host, and back.
        device_bytes: Given back, and taken again, rows and unused pages included.
    """

    is_preserved: bool
    sleep_s: float
    wake_s: float
    first_tokens_s: float
    num_tokens: int
    host_bytes: int
    device_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saves:
    """Checkpoints while requests decode.

    Attributes:
        seconds: Of each save.
        num_bytes: Of each save.
        gaps_s: The longest time without a new token during each save.
    """

    seconds: list[float]
    num_bytes: list[int]
    gaps_s: list[float]


class Rollout:
    """An engine whose requests never end by themselves."""

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], max_new: int) -> None:
        self.engine = engine
        self.num_requests = len(prompts)
        params = SamplingParams(
            temperature=0, max_new_tokens=max_new, ignore_eos=True, detokenize=False
        )

        def run() -> None:
            try:
                engine.generate_requests(prompts, params)
            except EngineShutdownError:
                return

        threading.Thread(target=run, daemon=True).start()
        self.wait_until_all_decode(0)

    def num_tokens(self) -> int:
        """Generated so far."""
        return self.engine.get_internal_state().counters.num_output_tokens

    def wait_until_all_decode(self, before: int) -> None:
        """Until each request has a token more than when there were so many in all."""
        deadline = time.monotonic() + WAIT_S
        while True:
            state = self.engine.get_internal_state()
            is_whole = state.running_batch_size == self.num_requests and not state.num_prefilling
            # A request whose prefill is complete decodes in the same dispatch.
            if is_whole and state.counters.num_output_tokens > before:
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"not all requests decode after {WAIT_S} s: {state}")

    def cycle(self, *, preserve: bool) -> Cycle:
        """Sleeps, wakes and waits for the next tokens."""
        engine = self.engine
        old = engine.get_internal_state().counters
        device_bytes = engine.sleep(1, preserve_state=preserve)
        asleep = engine.get_internal_state()
        waking = time.perf_counter()
        engine.wake_up()
        self.wait_until_all_decode(asleep.counters.num_output_tokens)
        first_tokens_s = time.perf_counter() - waking
        new = engine.get_internal_state().counters
        return Cycle(
            is_preserved=preserve,
            sleep_s=new.sleep_s - old.sleep_s,
            wake_s=new.wake_s - old.wake_s,
            first_tokens_s=first_tokens_s,
            num_tokens=new.num_output_tokens - asleep.counters.num_output_tokens,
            host_bytes=asleep.host_bytes,
            device_bytes=device_bytes,
        )

    def saves(self, folder: Path, repeats: int) -> Saves:
        """Saves to a folder again and again, beside the requests that decode."""
        reports, gaps_s = [], []
        for _ in range(repeats):
            last, last_s, longest_s = self.num_tokens(), time.perf_counter(), 0.0
            with ThreadPoolExecutor(1) as pool:
                save = pool.submit(self.engine.save_checkpoint, folder)
                while not save.done():
                    count, now_s = self.num_tokens(), time.perf_counter()
                    if count > last:
                        longest_s, last, last_s = max(longest_s, now_s - last_s), count, now_s
                reports.append(save.result())
            gaps_s.append(max(longest_s, time.perf_counter() - last_s))
        return Saves(
            seconds=[report.seconds for report in reports],
            num_bytes=[report.num_bytes for report in reports],
            gaps_s=gaps_s,
        )


def copy_rate(num_bytes: int, repeats: int) -> float:
    """Median bytes a second of copying into fresh memory, in numpy and on one core.

    Fresh memory is as cold as a sleep finds it: a virtual machine may have given to its host what
    was freed seconds ago, and gets it back much more slowly than what was freed just now.
    """
    source = np.ones(num_bytes // 4, np.float32)
    rates: list[float] = []
    for _ in range(repeats):
        time.sleep(COOLING_S)
        started = time.perf_counter()
        source.copy()
        rates.append(source.nbytes / (time.perf_counter() - started))
    return float(np.median(rates))


@contextmanager
def rollout(model: str, num_requests: int, num_tokens: int) -> Iterator[Rollout]:
    """Requests that decode."""
    config = dataclasses.replace(MODELS[model].config, context_length=2 * num_tokens)
    engine = Engine(
        model_config=config,
        load_format="dummy",
        page_size=16,
        num_kv_tokens=num_requests * (num_tokens + num_tokens // 2),
        max_running_requests=num_requests,
        batch_buckets=(num_requests,),
        max_model_len=num_tokens + num_tokens // 2,
        decode_steps=1,
    )
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, config.vocab_size, (num_requests, num_tokens)).tolist()
    with engine:
        engine.warmup()
        yield Rollout(engine, prompts, num_tokens // 2)


def median(measured: Sequence[Any], field: str) -> float:
    """Median of an attribute."""
    return float(np.median([getattr(each, field) for each in measured]))


def cycle_lines(cycles: Sequence[Cycle], bytes_per_s: float) -> list[str]:
    """The table of sleep and wake."""
    lines = [
        f"## Sleep and wake, medians of {len(cycles) // 2}",
        "",
        "| KV pages | copied, MB | given back, MB | sleep, ms | wake, ms | the copy, ms "
        "| wake to a token of each, s | tokens meanwhile |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for preserve in (True, False):
        own = [each for each in cycles if each.is_preserved is preserve]
        copied = own[0].host_bytes
        lines.append(
            f"| {'kept' if preserve else 'given up'} | {copied / 1e6:.0f} "
            f"| {own[0].device_bytes / 1e6:.0f} | {1e3 * median(own, 'sleep_s'):.0f} "
            f"| {1e3 * median(own, 'wake_s'):.0f} | {1e3 * copied / bytes_per_s:.0f} "
            f"| {median(own, 'first_tokens_s'):.2f} | {median(own, 'num_tokens'):.0f} |"
        )
    return [*lines, ""]


def save_lines(saves: Saves) -> list[str]:
    """The table of checkpoints."""
    return [
        "## Checkpoints while requests decode, medians",
        "",
        "| saves | written, MB | ms | longest time without a token, ms |",
        "|---:|---:|---:|---:|",
        f"| {len(saves.seconds)} | {np.median(saves.num_bytes) / 1e6:.2f} "
        f"| {1e3 * np.median(saves.seconds):.0f} | {1e3 * np.median(saves.gaps_s):.0f} |",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes the results."""
    parser = make_parser(__doc__, pairs=5)
    args = parser.parse_args(argv)
    model = "tiny" if args.quick else "small"
    repeats = 1 if args.quick else args.pairs
    num_requests, num_tokens = (8, 128) if args.quick else (64, 1000)
    with rollout(model, num_requests, num_tokens) as running:
        found = [
            running.cycle(preserve=preserve) for _ in range(repeats) for preserve in (True, False)
        ]
        with tempfile.TemporaryDirectory() as folder:
            saves = running.saves(Path(folder), repeats)
    rate = copy_rate(found[0].host_bytes, repeats)
    lines = [
        *cycle_lines(found, rate),
        *save_lines(saves),
    ]
    write_results(
        output_dir(args) / "sleep_wake.md",
        "Sleep, wake and checkpoints",
        "benchmarks/interruption/sleep_wake.py",
        lines,
        {
            "cycles": [dataclasses.asdict(each) for each in found],
            "copy_bytes_per_s": rate,
            "saves": dataclasses.asdict(saves),
        },
        facts=[
            f"{MODELS[model].in_words}, float32, random weights; {num_requests} requests of "
            f"{num_tokens} prompt tokens that decode, one step a dispatch",
            f"The copy: as many bytes with numpy on one core, into fresh memory, "
            f"{rate / 1e9:.1f} GB/s",
        ],
    )


if __name__ == "__main__":
    main()
