"""Random pauses, updates and new requests, with every answer checked.

The requests, the book-keeping and the uninterrupted engines that answers are compared with are
those of `tests/engine/test_interrupt_machine.py`, on its model.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import random
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax

from benchmarks.lib.reporting import ROOT
from sgljax_engine import Engine, EngineState
from sgljax_engine.core import commands as cmd
from sgljax_engine.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

sys.path.insert(0, str(ROOT))
from tests.compilation import recorded_programs
from tests.engine.expected_state import ExpectedState, Update
from tests.engine.interrupt_calls import Caller, PlainCall
from tests.engine.interrupt_model import NUM_WEIGHTS, WEIGHTS, History, References, Swap
from tests.engine.models import TINY, random_prompts
from tests.threads import LIMIT_S, start

NUM_ROWS = 64
MODES = ("abort", "retract", "in_place", "wait")
_FAMILIES = random_prompts(8, 60, 60, seed=1)
_MAX_NEW = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """What the process has at one time.

    Attributes:
        cycle: Cycles done.
        rss_bytes: Resident memory.
        array_bytes: Of all live JAX arrays.
    """

    cycle: int
    rss_bytes: int
    array_bytes: int


@dataclasses.dataclass(kw_only=True)
class Totals:
    """What happened.

    Attributes:
        num_pauses, num_updates: By mode.
        num_requests: Of callers; each was answered once, or the run had failed.
        num_whole, num_aborted: Of those, how they ended.
        num_compared: Tokens that were compared with an uninterrupted engine's.
        num_after_update: Requests that came after an update and were compared.
        num_cached: Prompt tokens that came from the prefix cache.
        num_retractions: Times that a request lost its pages.
        num_programs: New device programs, of any kind, after the warm-up.
    """

    num_pauses: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(MODES, 0))
    num_updates: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(MODES, 0))
    num_requests: int = 0
    num_whole: int = 0
    num_aborted: int = 0
    num_compared: int = 0
    num_after_update: int = 0
    num_cached: int = 0
    num_retractions: int = 0
    num_programs: int = 0


class Cycles:
    """An engine, and what it goes through."""

    def __init__(self, seed: int) -> None:
        self.totals = Totals()
        self.samples: list[Sample] = []
        self._rng = random.Random(seed)
        self._engine = Engine(
            model_config=TINY,
            weights=WEIGHTS[0],
            page_size=4,
            num_kv_tokens=NUM_ROWS * 40,
            max_model_len=128,
            max_running_requests=NUM_ROWS,
            decode_steps=4,
            init_new_token_ratio=0.0,
            min_new_token_ratio=0.0,
            forbid_compile=True,
        )
        self._caller, self._history = Caller(self._engine), History(0)
        self._references = References()
        self._warm_up()
        num_compiles = self._engine.get_internal_state().num_compiles
        self._expected = ExpectedState(self._engine, self._history, num_compiles)

    def _warm_up(self) -> None:
        self._engine.warmup()
        for donate in (False, True):
            version = self._engine.update_weights(WEIGHTS[0], donate=donate, verify=True)
            self._history.swaps[version] = Swap(0, "retract")
        self._references.warm_up()

    def run(self, count: int, sample_every: int) -> None:
        """Does cycles; the first wrong answer ends the run."""
        with recorded_programs() as programs:
            for cycle in range(count):
                self._cycle()
                if (cycle + 1) % 10 == 0:
                    self._verify()
                if (cycle + 1) % sample_every == 0:
                    self._sample(cycle + 1)
            self._expected.finish()
            self._verify()
            self.totals.num_programs = len(programs)
        counters = self._engine.get_internal_state().counters
        self.totals.num_cached = counters.num_cached_tokens
        self.totals.num_retractions = counters.num_retractions
        self._engine.shutdown()
        self._references.close()

    def _cycle(self) -> None:
        rng = self._rng
        self._top_up(NUM_ROWS)
        self._dispatch(rng.randint(0, 8))
        if rng.random() < 0.3:
            self._update(rng.choice(MODES))
        if rng.random() < 0.8:
            self._pause(rng.choice(MODES))
        self._top_up(NUM_ROWS + rng.randint(0, 8))
        if rng.random() < 0.5:
            self._update(rng.choice(MODES))
        self._expected.check()
        self._expected.note_continue()
        request = ContinueGenerationReqInput()
        self._ask(functools.partial(cmd.Continue, request))
        self._expected.check()

    def _ask(self, command: Any) -> None:
        self._expected.send(command).result(LIMIT_S)

    def _top_up(self, count: int) -> None:
        """New requests, until there are so many."""
        state, rng = self._expected.state(), self._rng
        for _ in range(count - state.running_batch_size - state.waiting_queue_size):
            prompt = rng.choice(_FAMILIES)[: rng.randint(1, 60)]
            rid = f"r{self.totals.num_requests}"
            self._expected.note_call(
                self._caller.call("plain", rid, prompt, rng.randint(1, _MAX_NEW))
            )
            self.totals.num_requests += 1

    def _dispatch(self, count: int) -> None:
        """Lets the engine run for some dispatches."""
        state = self._expected.state()
        goal = state.counters.num_dispatches + count
        while _has_work(state) and state.counters.num_dispatches < goal:
            state = self._expected.state()

    def _pause(self, mode: str) -> None:
        request = PauseGenerationReqInput(mode=mode)  # type: ignore[arg-type]
        future = self._expected.send(functools.partial(cmd.Pause, request))
        self._expected.note_pause(mode, future)
        if mode != "wait" or self._rng.random() < 0.7:  # else it goes on while more is asked
            future.result(LIMIT_S)
            self._expected.is_drained = mode == "wait"
        self.totals.num_pauses[mode] += 1

    def _update(self, mode: str) -> None:
        if mode == "wait" and self._expected.is_halted:
            mode = "retract"  # what runs could not end
        swap = Swap(self._rng.randrange(NUM_WEIGHTS), mode)
        donate = self._rng.random() < 0.2
        exposed = self._expected.exposed(is_settled=True)
        future: Future[int] = start(
            lambda: self._engine.update_weights(
                WEIGHTS[swap.weights],
                mode=mode,  # type: ignore[arg-type]
                donate=donate,
            )
        )
        update = Update(
            future=future,
            swap=swap,
            exposed=exposed if mode == "in_place" else list(self._expected.calls),
            num_calls=len(self._expected.calls),
            may_fail=False,
        )
        self._expected.updates.append(update)
        future.exception(LIMIT_S)
        self._expected.collect_updates()
        self.totals.num_updates[mode] += 1

    def _verify(self) -> None:
        """Compares what was answered, and forgets it."""
        expected, calls = self._expected, self._expected.calls
        answered = [call for call in calls if call.results is not None]
        expected.calls = answered
        expected.check_results(self._references)
        for call in answered:
            assert isinstance(call, PlainCall)
            for result in call.results or ():
                pieces = self._history.pieces(call, result)
                self.totals.num_compared += sum(end - begin for begin, end, _ in pieces)
                self.totals.num_after_update += bool(pieces) and call.version > 0
                self.totals.num_whole += result.finish == "length"
                self.totals.num_aborted += result.finish == "abort"
        expected.calls = [call for call in calls if call.results is None]
        names = {rid for call in expected.calls for rid in call.rids}
        expected.over &= names
        expected.not_started &= names
        expected.pauses = [pause for pause in expected.pauses if not pause.future.done()]
        self._references.forget()

    def _sample(self, cycle: int) -> None:
        gc.collect()
        array_bytes = sum(array.nbytes for array in jax.live_arrays())
        self.samples.append(Sample(cycle=cycle, rss_bytes=_rss_bytes(), array_bytes=array_bytes))


def _has_work(state: EngineState) -> bool:
    return bool(state.running_batch_size or state.waiting_queue_size)


def _rss_bytes() -> int:
    """Resident memory as Linux tells it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "VmRSS":
            return int(value.split()[0]) * 1024
    raise OSError("/proc/self/status has no VmRSS")


def format_cycles(count: int, totals: Totals, samples: list[Sample]) -> list[str]:
    """A section in Markdown."""

    def by_mode(counts: dict[str, int]) -> str:
        return ", ".join(f"{mode} {number}" for mode, number in counts.items())

    facts = {
        "cycles": count,
        "pauses": by_mode(totals.num_pauses),
        "updates": by_mode(totals.num_updates),
        "requests": totals.num_requests,
        "answered whole": totals.num_whole,
        "answered, aborted by a pause or an update": totals.num_aborted,
        "lost": totals.num_requests - totals.num_whole - totals.num_aborted,
        "answered twice": 0,
        "retractions": totals.num_retractions,
        "prompt tokens from the prefix cache": totals.num_cached,
        "greedy tokens compared with uninterrupted engines": totals.num_compared,
        "requests among those that came after an update": totals.num_after_update,
        "differences (stale prefixes among them)": 0,
        "device programs made after the warm-up": totals.num_programs,
    }
    lines = [
        "## Random pauses and updates",
        "",
        f"{NUM_ROWS} rows. All pages are free at the end. Integrity is checked twice a cycle; the "
        "first wrong answer, second answer or lost request ends the run.",
        "",
        "| | |",
        "|---|---:|",
        *(f"| {name} | {value} |" for name, value in facts.items()),
        "",
        "| cycles done | resident, MB | JAX arrays, MB |",
        "|---:|---:|---:|",
    ]
    lines += [
        f"| {s.cycle} | {s.rss_bytes / 1e6:.1f} | {s.array_bytes / 1e6:.3f} |" for s in samples
    ]
    return [*lines, ""]
