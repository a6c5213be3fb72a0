"""What an engine tells and notes of its work: progress, recordings, seconds of pauses."""

from __future__ import annotations

import _thread
import functools
import itertools
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import pytest

from sgljax_engine import Engine, EngineShutdownError, InvalidRequestError, WeightLoadError
from sgljax_engine.builder.endable_progress import EndableProgress
from sgljax_engine.builder.group import start_on_clean_thread
from sgljax_engine.observability.trace import Recorder
from tests.engine.models import TINY, random_prompts, spread_weights
from tests.geometry import SMALL
from tests.threads import (
    LIMIT_S,
    first_piece,
    gate_steps,
    held,
    running,
    start,
    take_steps,
    wait_for,
)

GOLDEN = Path(__file__).parents[1] / "golden"

GREEDY = {"temperature": 0, "max_new_tokens": 8}


class Listener:
    """Keeps all that it is told; thread-safe since appending is."""

    def __init__(self):
        self.calls: list[tuple[Any, ...]] = []

    def started(self, task: str, total: int, unit: str) -> None:
        self.calls.append(("started", task, total, unit))

    def advanced(self, task: str, count: int) -> None:
        self.calls.append(("advanced", task, count))

    def finished(self, task: str) -> None:
        self.calls.append(("finished", task))

    def of(self, task: str) -> tuple[int, str, int]:
        """Total and unit of a task that was started and ended once, and how far it got."""
        (started,) = [call for call in self.calls if call[:2] == ("started", task)]
        assert self.calls.count(("finished", task)) == 1
        done = sum(call[2] for call in self.calls if call[:2] == ("advanced", task))
        return started[2], started[3], done


@pytest.fixture(scope="module")
def listener():
    return Listener()


@pytest.fixture(scope="module")
def engine(listener):
    with Engine(model_config=TINY, weights=spread_weights(), progress=listener, **SMALL) as engine:
        yield engine


# ------------------------------------------------------------------ progress


def test_loading_and_warm_up_are_told(engine, listener):
    total, unit, done = listener.of("place weights")
    assert (total, unit) == (done, "tensor")
    num_new = engine.warmup()
    total, unit, done = listener.of("compile programs")
    assert (total, unit) == (done, "program")
    assert 3 <= done <= num_new  # those that only move pages are compiled when they run
    calls = len(listener.calls)
    engine.generate(None, GREEDY, random_prompts(6, 3, 9))
    assert len(listener.calls) == calls, "generation tells listeners nothing"


def test_reading_a_folder_is_told_in_bytes(tmp_path):
    listener = Listener()
    folder = GOLDEN / "qwen3_mha_sharded"
    with Engine(folder, dtype="float32", progress=listener, **SMALL):
        total, unit, done = listener.of("read weights")
    assert unit == "B"
    assert 0.9 * total < done <= total  # the files hold their headers too
    assert len([call for call in listener.calls if call[:2] == ("advanced", "read weights")]) > 10


def test_a_task_that_fails_is_finished(tmp_path):
    listener = Listener()
    (tmp_path / "config.json").write_text((GOLDEN / "qwen3_gqa_tied" / "config.json").read_text())
    with pytest.raises(WeightLoadError):
        Engine(tmp_path, progress=listener)
    assert listener.calls == [("started", "read weights", 0, "B"), ("finished", "read weights")]


def test_shutdown_ends_a_warm_up():
    """With the program in work: others may take minutes."""
    told, go_on = threading.Event(), threading.Event()

    class Held(Listener):
        def started(self, task: str, total: int, unit: str) -> None:
            super().started(task, total, unit)
            if task == "compile programs":
                told.set()
                assert go_on.wait(LIMIT_S)

    listener = Held()
    engine = Engine(model_config=TINY, weights=spread_weights(), progress=listener, **SMALL)
    warmup = start(functools.partial(engine.warmup, include_table=True))
    assert told.wait(LIMIT_S)
    ended = start(engine.shutdown)
    wait_for(lambda: not engine.is_running)
    go_on.set()
    ended.result(LIMIT_S)
    assert isinstance(warmup.exception(LIMIT_S), EngineShutdownError)
    assert not [call for call in listener.calls if call[:2] == ("advanced", "compile programs")]


def test_an_interrupt_ends_the_making_of_an_engine():
    """With the tensor in work: a folder may take minutes to read."""
    progress = EndableProgress(None)

    def build() -> NoReturn:
        _thread.interrupt_main()
        while True:
            progress.advanced("place weights", 1)

    before = threading.enumerate()
    with pytest.raises(KeyboardInterrupt):
        start_on_clean_thread(build, progress)
    assert threading.enumerate() == before


def test_progress_is_read_without_the_engine_thread(engine):
    before = engine.get_progress()
    engine.generate(None, GREEDY, random_prompts(3, 3, 9))
    now = engine.get_progress()
    assert now.num_finished - before.num_finished == 3
    assert now.num_output_tokens - before.num_output_tokens == 24
    assert (now.num_running, now.num_waiting) == (0, 0)
    assert now.weight_version == engine.weight_version
    state = engine.get_internal_state()
    assert state.counters.num_cached_tokens == now.num_cached_tokens
    with held(engine):  # its thread takes no command now
        assert engine.get_progress() == now


# ------------------------------------------------------------------ recordings


def test_recording_adds_up_with_the_counters(engine):
    before = engine.get_internal_state().counters
    engine.start_recording()
    engine.generate(None, GREEDY, random_prompts(6, 3, 9, seed=1))
    engine.update_weights(spread_weights(seed=1))
    recording = engine.stop_recording()
    now = engine.get_internal_state().counters
    names = Counter((event.track, event.name) for event in recording.events)
    of = {name: [event for event in recording.events if event.name == name] for _, name in names}
    assert len(recording.samples) == now.num_dispatches - before.num_dispatches
    rows = now.num_decode_rows - before.num_decode_rows
    assert sum(int(event.args["rows"]) for event in of["decode"]) == rows
    assert sum(int(event.args["tokens"]) for event in of["decode"]) == 48
    prefilled = now.num_prefill_tokens - before.num_prefill_tokens
    assert sum(int(event.args["tokens"]) for event in of["prefill"]) == prefilled
    assert names["detokenizer", "detokenize"] == 6
    assert names["engine", "swap weights"] == names["updates", "prepare weights"] == 1
    assert all(
        recording.begin_s <= event.begin_s <= event.end_s <= recording.end_s
        for event in recording.events
    )
    engine_slices = sorted(
        (event.begin_s, event.end_s)
        for event in recording.events
        if event.name in ("prefill", "decode")
    )
    for (_, end), (begin, _) in itertools.pairwise(engine_slices):
        assert end <= begin, "a thread does one thing at a time"
    assert recording.num_dropped == 0


def test_nothing_is_recorded_unless_asked_for(engine):
    engine.generate(None, GREEDY, [1, 2, 3])
    recording = engine.stop_recording()
    assert (recording.events, recording.samples, recording.num_dropped) == ([], [], 0)


def test_the_rings_are_bounded(engine):
    engine.start_recording(max_events=5)
    engine.generate(None, GREEDY, random_prompts(8, 3, 9, seed=2))
    recording = engine.stop_recording()
    assert len(recording.events) == 5
    assert len(recording.samples) <= 5
    assert recording.num_dropped > 5
    for value in (0, True, 1.5):
        with pytest.raises(InvalidRequestError, match="max_events must be an int >= 1"):
            engine.start_recording(max_events=value)


def test_retractions_pauses_and_sleep_are_recorded(engine):
    gate_steps(engine).start_recording()
    stream = engine.generate(None, GREEDY | {"max_new_tokens": 240}, [5, 6, 7], stream=True)
    first_piece(stream)
    engine.pause_generation("retract")
    engine.pause_generation("in_place")  # changes the mode of the pause; it is one pause
    engine.continue_generation()
    take_steps(engine)
    engine.sleep()
    engine.wake_up()
    engine.pause_generation("in_place")
    recording = engine.stop_recording()
    engine.continue_generation()
    with running():
        assert sum(1 for _ in stream) > 0
    states = {event.name: event for event in recording.events if event.track == "state"}
    names = Counter(event.name for event in recording.events)
    assert names["pause"] == 2
    assert states["pause"].end_s == recording.end_s, "the second one was not over"
    assert states["asleep"].args == {"level": 1}
    assert names["retract"] == 2


def test_a_recording_stopped_by_another_thread_loses_no_engine():
    """Starting and stopping while others append."""
    recorder, is_over = Recorder(), threading.Event()

    def append():
        while not is_over.is_set():
            if recorder.is_on:
                recorder.instant("engine", "x", {})

    threads = [threading.Thread(target=append) for _ in range(2)]
    for thread in threads:
        thread.start()
    sizes = []
    for _ in range(20):
        recorder.start(max_events=50)
        time.sleep(0.002)
        sizes.append(len(recorder.stop().events))
    is_over.set()
    for thread in threads:
        thread.join()
    assert max(sizes) == 50


# ------------------------------------------------------------------ counters


def test_seconds_of_pauses(engine):
    before = engine.get_internal_state().counters.pause_s
    engine.pause_generation()
    time.sleep(0.02)
    first = engine.get_internal_state().counters.pause_s
    assert first - before >= 0.02, "the pause of now counts"
    time.sleep(0.02)
    assert engine.get_internal_state().counters.pause_s - first >= 0.02
    engine.continue_generation()
    after = engine.get_internal_state().counters.pause_s
    time.sleep(0.01)
    engine.continue_generation()
    assert engine.get_internal_state().counters.pause_s == after


def test_used_tokens_of_one_request(engine):
    """A request of 3 prompt and 8 output tokens holds 1 to 3 pages of 4, in each dispatch."""
    engine.flush_cache()
    before = engine.get_internal_state().counters
    engine.generate(None, GREEDY, [9, 8, 7])
    now = engine.get_internal_state().counters
    num = now.num_dispatches - before.num_dispatches
    used = now.used_kv_tokens - before.used_kv_tokens
    assert 4 * num <= used <= 12 * num
    assert used % 4 == 0


def test_idle_rows_and_the_tail(engine):
    """One request leaves the other rows idle, from start to end."""
    before = engine.get_internal_state().counters
    engine.generate(None, GREEDY, [9, 8, 7])
    one = engine.get_internal_state().counters.since(before)
    assert one.row_s > 0
    assert one.tail_s == pytest.approx(one.prefill_s + one.decode_s)
    assert one.idle_row_s / one.row_s == pytest.approx(SMALL["max_running_requests"] - 1)
