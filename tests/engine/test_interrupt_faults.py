"""Faults that were found beside the machine of `test_interrupt_machine.py`."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from sgljax_engine import (
    Engine,
    EngineShutdownError,
    EngineStateError,
    InvalidRequestError,
    SamplingParams,
    WeightsLostError,
)
from sgljax_engine.weights import sync
from tests.engine.models import TINY, spread_weights
from tests.threads import LIMIT_S, start

HANG_S = 3
"""Waiting longer than this for what takes milliseconds is a hang."""
LONG = SamplingParams(temperature=0, max_new_tokens=200)


@pytest.fixture
def engine():
    with Engine(
        model_config=TINY,
        weights=spread_weights(),
        page_size=4,
        max_running_requests=8,
        decode_steps=2,
    ) as engine:
        yield engine


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "timed out"


@pytest.mark.xfail(reason="the second update waits for the first, and that for the pause's end")
def test_updates_in_a_pause_that_came_while_another_waited(engine):
    """Pause, update, continue on one thread must not depend on what other threads wait for."""
    running = start(lambda: engine.generate_requests([[1, 2]] * 8, LONG))
    wait_for(lambda: engine.get_internal_state().running_batch_size == 8)
    waiting = start(lambda: engine.update_weights(spread_weights(), mode="wait"))
    wait_for(lambda: not engine._loop._core.scheduler.admits_new)
    engine.pause_generation("retract")
    in_pause = start(lambda: engine.update_weights(spread_weights(seed=1)))
    try:
        assert in_pause.result(HANG_S) == 1
        assert isinstance(waiting.exception(HANG_S), EngineStateError)
    finally:
        engine.continue_generation()
        running.result(LIMIT_S)


@pytest.mark.xfail(reason="apply_donating pops old weights that are gone already: KeyError")
def test_a_donating_update_recovers_from_one_that_failed(engine, monkeypatch):
    with monkeypatch.context() as patch:

        def broken(*_):
            raise RuntimeError("planted fault")

        patch.setattr(sync, "_store_one", broken)
        with pytest.raises(WeightsLostError):
            engine.update_weights(spread_weights(), donate=True)
    assert engine.update_weights(spread_weights(seed=1), donate=True) == 1


@pytest.mark.xfail(reason="the command in hand is in no list when the thread ends")
def test_a_bug_on_the_engine_thread_leaves_no_caller_waiting(engine, monkeypatch):
    def broken(mode):
        raise RuntimeError("planted bug")

    monkeypatch.setattr(engine._loop._core, "disturb", broken)
    paused = start(engine.pause_generation)
    assert isinstance(paused.exception(HANG_S), EngineShutdownError)


@pytest.mark.xfail(reason="ids of prompts with several samples are not compared")
def test_an_id_is_one_prompts_alone(engine):
    """Else abort_request(rid) finds the one and forgets the other."""
    engine.pause_generation()
    several = start(
        lambda: engine.generate(
            input_ids=[1, 2], sampling_params={"max_new_tokens": 9, "n": 2}, rid="a"
        )
    )
    wait_for(lambda: engine.get_internal_state().waiting_queue_size == 2)
    one = start(
        lambda: engine.generate(input_ids=[3], sampling_params={"max_new_tokens": 9}, rid="a")
    )
    try:
        assert isinstance(one.exception(HANG_S), InvalidRequestError)
    finally:
        engine.continue_generation()
        several.result(LIMIT_S)
