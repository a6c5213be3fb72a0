"""Shutdown at any moment answers every caller, with an output or an EngineShutdownError."""

from __future__ import annotations

import functools
import random
from concurrent.futures import Future
from typing import Any

import pytest

from sgljax_engine import Engine, EngineShutdownError, EngineStateError
from tests import inside
from tests.engine.interrupt_calls import Call, Caller
from tests.engine.interrupt_model import OPTIONS, WEIGHTS
from tests.engine.models import TINY, random_prompts
from tests.threads import LIMIT_S, held, start, wait_for

SITUATIONS = (
    "running",
    "paused abort",
    "paused retract",
    "paused in_place",
    "paused wait",
    "updating retract",
    "updating in_place",
    "updating abort",
    "updating wait",
    "updating wait, paused retract",
    "pausing wait, updating wait",
    "sleeping 1",
    "sleeping 2, updating retract",
    "sleeping preserved",
    "pausing wait, updating wait, sleeping preserved",
    "sleeping preserved, waking",
    "held",
)
"""What goes on; "pausing" and "updating" are not waited for."""


def make_engine() -> Engine:
    options: dict[str, Any] = OPTIONS | {"forbid_compile": False}
    return Engine(model_config=TINY, weights=WEIGHTS[0], **options)


def make_calls(caller: Caller, rng: random.Random) -> list[Call]:
    """More than run at once, in all forms."""
    return [
        caller.call(rng.choice(["plain", "stream", "task"]), f"r{i}", prompt, rng.randint(20, 60))
        for i, prompt in enumerate(random_prompts(12, 1, 50, seed=rng.randrange(100)))
    ]


def bring_about(engine: Engine, situation: str) -> list[Future[Any]]:
    """Returns what other threads ask for meanwhile."""
    asked: list[Future[Any]] = []
    for part in situation.split(", "):
        verb, _, rest = part.partition(" ")
        mode: Any = rest
        if verb == "paused" and mode != "wait":
            engine.pause_generation(mode)
        elif verb in ("paused", "pausing"):
            asked.append(start(lambda: engine.pause_generation("wait")))
            wait_for(lambda: engine.get_internal_state().pause_mode == "wait")
        elif verb == "sleeping":
            engine.sleep(2 if rest == "2" else 1, preserve_state=rest == "preserved")
        elif verb == "waking":
            asked.append(start(engine.wake_up))
        elif verb == "updating":
            update = start(functools.partial(engine.update_weights, WEIGHTS[1], mode=mode))
            if mode == "wait":
                scheduler = inside.core(engine).scheduler
                wait_for(lambda: update.done() or not scheduler.admits_new)  # noqa: B023
            asked.append(update)
    return asked


def assert_answered(calls: list[Call], asked: list[Future[Any]]) -> int:
    """Returns how many calls failed."""
    num_failed = 0
    for call in calls:
        try:
            call.collect()
        except EngineShutdownError:
            num_failed += 1
    for future in asked:
        error = future.exception(LIMIT_S)
        assert error is None or isinstance(error, EngineShutdownError | EngineStateError)
    return num_failed


@pytest.mark.parametrize("situation", SITUATIONS)
def test_every_caller_is_answered(situation):
    rng = random.Random(situation)
    engine = make_engine()
    calls = make_calls(Caller(engine), rng)
    wait_for(lambda: engine.get_internal_state().counters.num_output_tokens > 0)
    asked = bring_about(engine, situation)
    if situation == "held":
        with held(engine):
            waiting = (engine.pause_generation, engine.flush_cache, engine.get_internal_state)
            asked = [*bring_about(engine, "updating abort"), *map(start, waiting)]
            ended = start(engine.shutdown)
    else:
        ended = start(engine.shutdown)
    ended.result(LIMIT_S)
    assert_answered(calls, asked)
    with pytest.raises(EngineShutdownError):
        engine.pause_generation()


def test_at_random_moments():
    num_failed = []
    for seed in range(6):
        rng = random.Random(seed)
        engine = make_engine()
        calls = make_calls(Caller(engine), rng)
        num_dispatches = rng.randint(0, 30)
        wait_for(
            lambda: engine.get_internal_state().counters.num_dispatches >= num_dispatches  # noqa: B023
        )
        asked = [start(lambda: engine.update_weights(WEIGHTS[1])) for _ in range(2)]  # noqa: B023
        ends = [start(engine.shutdown) for _ in range(2)]
        for end in ends:
            end.result(LIMIT_S)
        num_failed.append(assert_answered(calls, asked))
    assert max(num_failed) > 0
