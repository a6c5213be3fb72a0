"""Answers are handed over while the device runs, and never kept back."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from sgljax_engine import Engine, EngineStepError
from sgljax_engine.core import commands as cmd
from sgljax_engine.runner.results import PendingDecode
from tests import inside
from tests.engine.models import TINY, spread_weights
from tests.geometry import SMALL
from tests.threads import LIMIT_S, held, start, wait_for


@pytest.fixture(scope="module")
def shared():
    with Engine(model_config=TINY, weights=spread_weights(), **SMALL) as engine:
        yield engine


@pytest.fixture
def engine(shared):
    """Idle, and so it must be left."""
    yield shared
    shared.check_integrity()
    assert shared.flush_cache().success


def recorded_events(engine, monkeypatch):
    """Launches of decode, waits for it, and requests handed over, as they come."""
    events = []
    runner, queue = inside.runner(engine), inside.core(engine).outputs._queue
    launch, wait, put = runner.decode, PendingDecode.wait, queue.put

    def recorded_launch(output):
        events.append("launch")
        return launch(output)

    def recorded_wait(pending):
        events.append("wait")
        return wait(pending)

    def recorded_put(news):
        if news is not None:
            events.append(f"answer {news.num_tokens}")
        put(news)

    monkeypatch.setattr(runner, "decode", recorded_launch)
    monkeypatch.setattr(PendingDecode, "wait", recorded_wait)
    monkeypatch.setattr(queue, "put", recorded_put)
    return events


def greedy(max_new):
    return {"temperature": 0, "max_new_tokens": max_new}


def test_answers_go_out_while_the_next_dispatch_runs(engine, monkeypatch):
    events = recorded_events(engine, monkeypatch)
    engine.generate(input_ids=[[1, 2], [3, 4]], sampling_params=[greedy(4), greedy(8)])
    assert events == ["launch", "wait", "launch", "answer 4", "wait", "answer 8"]


def test_streamed_pieces_too(engine, monkeypatch):
    events = recorded_events(engine, monkeypatch)
    pieces = list(engine.generate(input_ids=[1, 2], sampling_params=greedy(8), stream=True))
    assert events == [
        *("launch", "wait", "launch", "answer 1"),
        *("wait", "launch", "answer 5", "wait", "answer 8"),
    ]
    assert sum(len(piece["output_ids"]) for piece in pieces) == 8


def test_commands_find_everything_handed_over(engine, monkeypatch):
    """One that comes while a request finishes is answered after the request."""
    queue = inside.core(engine).outputs._queue
    finished, states = [], []
    before = engine.get_internal_state().counters.num_finished
    put, wait, state = queue.put, PendingDecode.wait, inside.core(engine).state

    def recorded_put(news):
        if news is not None:
            finished.append(news.record.request.rid)
        put(news)

    def asking_wait(pending):
        inside.submit(engine, cmd.GetState(Future()))
        return wait(pending)

    def recorded_state():
        seen = state()
        states.append((len(finished), seen.counters.num_finished - before))
        return seen

    monkeypatch.setattr(queue, "put", recorded_put)
    monkeypatch.setattr(PendingDecode, "wait", asking_wait)
    monkeypatch.setattr(inside.core(engine), "state", recorded_state)
    engine.generate(input_ids=[[1, 2], [3, 4]], sampling_params=[greedy(4), greedy(8)])
    engine.check_integrity()
    assert states == [(1, 1), (2, 2)]


def test_a_step_that_fails_keeps_no_answer_back(engine, monkeypatch):
    """The request that finished in the step before the failing one gets its output."""
    runner = inside.runner(engine)
    real, calls = runner.decode, []

    def flaky(output):
        calls.append(output)
        if len(calls) == 2:
            raise RuntimeError("planted fault")
        return real(output)

    monkeypatch.setattr(runner, "decode", flaky)
    with held(engine):
        callers = [
            start(lambda ids=ids, new=new: engine.generate_requests([ids], greedy(new)))
            for ids, new in (([1, 2], 4), ([3, 4], 8))
        ]
        wait_for(lambda: inside.tasks(engine).qsize() == 2)
    assert len(callers[0].result(LIMIT_S)[0].output_ids) == 4
    with pytest.raises(EngineStepError, match="planted fault"):
        callers[1].result(LIMIT_S)
