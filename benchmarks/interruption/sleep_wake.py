"""Sleep, wake and checkpoints: seconds, bytes, and what they spare.

    python benchmarks/interruption/sleep_wake.py            # small, about 6 minutes on 2 cores
    python benchmarks/interruption/sleep_wake.py --quick    # tiny, a smoke test

- 64 requests of 1,000 tokens are put to sleep while they decode and are woken again; times are
  compared with copying the same bytes, into memory that the process has just got, as sleep and wake
  do, and into memory that it had.
- Until each request has its next token: woken with its pages, against prefilled again. The two
  alternate.
- Arrays on the device before the engine existed, while it slept and after it woke, over 50 cycles.
- Checkpoints of the same requests: bytes, and how long decoding stands still for them.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.lib.reporting import ROOT, report_head, write_report
from sgljax_engine import CheckpointManager, Engine, EngineShutdownError, SamplingParams
from tunix_sgljax.bench.environment import describe_environment
from tunix_sgljax.bench.shapes import MODELS

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
        with_kv: Whether pages were written.
        seconds: Of each save.
        num_bytes: Of each save.
        num_written: Requests that each save wrote.
        gaps_s: The longest time without a new token during each save.
        undisturbed_s: The same over as long a time without a save.
    """

    with_kv: bool
    seconds: list[float]
    num_bytes: list[int]
    num_written: list[int]
    gaps_s: list[float]
    undisturbed_s: list[float]


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

    def longest_gap_s(self, until: threading.Event, start: Callable[[], None]) -> float:
        """The longest time without a new token, from the one before `start` until the event."""
        last, last_s, longest = self.num_tokens(), time.perf_counter(), 0.0
        start()
        while not until.is_set():
            count, now = self.num_tokens(), time.perf_counter()
            if count > last:
                longest, last, last_s = max(longest, now - last_s), count, now
        return max(longest, time.perf_counter() - last_s)

    def saves(self, folder: Path, *, with_kv: bool, repeats: int) -> Saves:
        """Saves to a folder again and again."""
        reports, gaps_s, undisturbed_s = [], [], []
        for _ in range(repeats):
            is_done = threading.Event()

            def save(is_done: threading.Event = is_done) -> None:
                try:
                    reports.append(self.engine.save_checkpoint(folder, include_kv=with_kv))
                finally:
                    is_done.set()

            started = time.perf_counter()
            gaps_s.append(self.longest_gap_s(is_done, threading.Thread(target=save).start))
            is_over = threading.Event()
            seconds = max(time.perf_counter() - started, 0.5)
            timer = threading.Timer(seconds, is_over.set)
            undisturbed_s.append(self.longest_gap_s(is_over, timer.start))
        return Saves(
            with_kv=with_kv,
            seconds=[report.seconds for report in reports],
            num_bytes=[report.num_bytes for report in reports],
            num_written=[report.num_written for report in reports],
            gaps_s=gaps_s,
            undisturbed_s=undisturbed_s,
        )


def live_bytes() -> int:
    """Of all arrays of this process that are not on the host."""
    arrays = (x for x in jax.live_arrays() if x.sharding.memory_kind != "pinned_host")
    return sum(array.nbytes for array in arrays)


def copy_rates(num_bytes: int, repeats: int) -> dict[str, float]:
    """Bytes a second of copying, in numpy and on one core: median rates by kind of target.

    Fresh memory is as cold as a sleep finds it: a virtual machine may have given to its host what
    was freed seconds ago, and gets it back much more slowly than what was freed just now.
    """
    source = np.ones(num_bytes // 4, np.float32)
    target = np.ones_like(source)
    rates: dict[str, list[float]] = {"fresh": [], "used": []}
    for _ in range(repeats):
        for kind in rates:
            time.sleep(COOLING_S if kind == "fresh" else 0)
            started = time.perf_counter()
            if kind == "used":
                np.copyto(target, source)
            else:
                source.copy()
            rates[kind].append(source.nbytes / (time.perf_counter() - started))
    return {kind: float(np.median(each)) for kind, each in rates.items()}


@contextmanager
def rollout(model: str, num_requests: int, num_tokens: int) -> Iterator[tuple[Rollout, int]]:
    """Requests that decode, and the bytes of arrays before their engine existed."""
    config = dataclasses.replace(MODELS[model].config, context_length=2 * num_tokens)
    gc.collect()  # what others left must not go away in between
    base = live_bytes()
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
        yield Rollout(engine, prompts, num_tokens // 2), base


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description="Sleep, wake and checkpoints.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output-dir", type=Path, help="instead of benchmarks/results")
    args = parser.parse_args(argv)
    model = "tiny" if args.quick else "small"
    repeats, cycles = (1, 2) if args.quick else (args.repeats, args.cycles)
    num_requests, num_tokens = (8, 128) if args.quick else (64, 1000)
    with rollout(model, num_requests, num_tokens) as (running, base):
        found = [
            running.cycle(preserve=preserve) for _ in range(repeats) for preserve in (True, False)
        ]
        with tempfile.TemporaryDirectory() as folder:
            saves = [
                running.saves(Path(folder) / str(with_kv), with_kv=with_kv, repeats=count)
                for with_kv, count in ((False, repeats), (True, min(repeats, 2)))
            ]
            sizes = checkpoint_sizes(Path(folder) / "False")
        running.engine.pause_generation("in_place")
        memory = {"base": base, "awake": live_bytes(), "asleep": [], "woken": []}
        for number in range(cycles):
            running.engine.sleep(1, preserve_state=number % 2 == 0)
            memory["asleep"].append(live_bytes())
            running.engine.wake_up()
            memory["woken"].append(live_bytes())
    rates = copy_rates(found[0].host_bytes, repeats)
    environment = describe_environment(jax.devices()[0].device_kind)
    lines = report_head(
        "Sleep, wake and checkpoints",
        "benchmarks/interruption/sleep_wake.py",
        environment,
        f"{MODELS[model].in_words}, float32, random weights; {num_requests} requests of "
        f"{num_tokens} prompt tokens that decode, one step a dispatch",
        f"Copying the bytes of a preserved sleep with numpy on one core: "
        f"{rates['fresh'] / 1e9:.1f} GB/s into fresh memory, {rates['used'] / 1e9:.1f} GB/s into "
        "memory that was used before",
    )
    lines += format_cycles(found, rates) + format_memory(memory) + format_saves(saves, sizes)
    content = {
        "cycles": [dataclasses.asdict(each) for each in found],
        "copy_bytes_per_s": rates,
        "memory": memory,
        "saves": [dataclasses.asdict(each) for each in saves],
        "checkpoint": sizes,
    }
    folder = args.output_dir or ROOT / (
        "outputs/bench_quick" if args.quick else "benchmarks/results"
    )
    write_report(folder / "sleep_wake.md", lines, environment, content)


def checkpoint_sizes(folder: Path) -> dict[str, float]:
    """Of a checkpoint without pages: bytes in all, of tokens, and for each request beside them."""
    requests = CheckpointManager(folder).load().scheduler_state.requests.values()
    # Ids of 4 bytes, and for output tokens three log-probs of 4 bytes.
    in_tokens = sum(4 * len(r.prompt_ids) + 16 * len(r.output_ids) for r in requests)
    with tempfile.TemporaryDirectory() as fresh:
        manager = CheckpointManager(fresh)
        report = manager.save(CheckpointManager(folder).load())
    return {
        "num_bytes": report.num_bytes,
        "token_bytes": in_tokens,
        "other_bytes_per_request": (report.num_bytes - in_tokens) / len(requests),
    }


def format_cycles(cycles: Sequence[Cycle], rates: dict[str, float]) -> list[str]:
    """The tables of sleep and wake."""
    lines = [
        f"## Sleep and wake, medians of {len(cycles) // 2}",
        "",
        "| KV pages | copied | given back | | moved | ms | moved into fresh memory "
        "| copied into fresh memory | copied into used memory |",
        "|---|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    first_s, num_tokens = {}, {}
    weights = min(each.host_bytes for each in cycles)
    for preserve in (True, False):
        own = [each for each in cycles if each.is_preserved is preserve]
        copied, given = own[0].host_bytes, own[0].device_bytes
        num_tokens[preserve] = float(np.median([each.num_tokens for each in own]))
        first_s[preserve] = float(np.median([each.first_tokens_s for each in own]))
        for name in ("sleep", "wake"):
            seconds = float(np.median([getattr(each, f"{name}_s") for each in own]))
            # Clearing counts as well. A CPU's weights come back in the place of the host's copy.
            moved = copied - weights + given - weights if name == "wake" else copied
            times = [
                seconds * rates[kind] / num_bytes
                for kind, num_bytes in (("fresh", moved), ("fresh", copied), ("used", copied))
            ]
            lines.append(
                f"| {'kept' if preserve else 'given up'} | {copied / 1e6:.0f} MB | "
                f"{given / 1e6:.0f} MB | {name} | {moved / 1e6:.0f} MB | {seconds * 1e3:.0f} | "
                f"{times[0]:.2f} | {times[1]:.2f} | {times[2]:.2f} |"
            )
    ratio = first_s[False] / first_s[True]
    return [
        *lines,
        "",
        "The last three columns say how many times as long as copying so many bytes it took. What "
        "is moved is, for a wake, the memory of all pages and decode rows, which is taken and "
        "cleared, and then the pages in use, which are filled.",
        "",
        f"From `wake_up` until each request has a token more: {first_s[True]:.2f} s with kept "
        f"pages, {first_s[False]:.2f} s with a prefill: {ratio:.1f} times as fast. Requests whose "
        "prefill is over go on while others are prefilled: "
        f"{num_tokens[True]:.0f} and {num_tokens[False]:.0f} tokens were made in those times.",
        "",
    ]


def format_memory(memory: dict[str, Any]) -> list[str]:
    """What lived on the device."""
    base, awake = memory["base"], memory["awake"]
    asleep, woken = memory["asleep"], memory["woken"]
    return [
        f"## Arrays on the device over {len(asleep)} cycles",
        "",
        f"{base} bytes before the engine existed, {awake} with it. Asleep: {min(asleep)} to "
        f"{max(asleep)}. Woken: {min(woken)} to {max(woken)}.",
        "",
    ]


def format_saves(saves: Sequence[Saves], sizes: dict[str, float]) -> list[str]:
    """The table of checkpoints."""
    lines = [
        f"## Checkpoints while requests decode, medians of {len(saves[0].seconds)} without pages "
        f"and of {len(saves[1].seconds)} with",
        "",
        "| KV pages | written | ms | longest time without a token | without a save |",
        "|---|---:|---:|---:|---:|",
    ]
    for each in saves:
        size, seconds, gap, alone = (
            float(np.median(x))
            for x in (each.num_bytes, each.seconds, each.gaps_s, each.undisturbed_s)
        )
        lines.append(
            f"| {'yes' if each.with_kv else 'no'} | {size / 1e6:.2f} MB | {seconds * 1e3:.0f} | "
            f"{gap * 1e3:.0f} ms | {alone * 1e3:.0f} ms |"
        )
    return [
        *lines,
        "",
        f"Without pages all requests take {sizes['num_bytes']:.0f} bytes: "
        f"{sizes['token_bytes']:.0f} of tokens and log-probs, and "
        f"{sizes['other_bytes_per_request']:.0f} for each request beside them.",
        "",
    ]


if __name__ == "__main__":
    main()
