"""What tests of interruptions share: an engine under load, and waiting for its states."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import pytest

from sgljax_engine import Engine, EngineState, RequestOutput, SamplingParams
from sgljax_engine.runner.kv import saved_pages
from tests import inside
from tests.engine.models import TINY, spread_weights
from tests.geometry import SMALL
from tests.threads import LIMIT_S, gate_steps, held, running, start, take_steps, wait_for

NUM_TOKENS = 150
"""Enough that a request is not finished before whoever saw its first token has acted."""

PAGES_PER_COPY = 4
"""Under `small_copies`."""

LONG = SamplingParams(temperature=0, max_new_tokens=NUM_TOKENS)


def make_engine(**given: Any) -> Engine:
    """A tiny engine, `SMALL` if nothing else is said, whose steps are gated."""
    options: dict[str, Any] = {**SMALL, **given}
    weights = options.pop("weights", None) or spread_weights()
    return gate_steps(Engine(model_config=TINY, weights=weights, **options))


@contextlib.contextmanager
def small_copies() -> Iterator[None]:
    """Pages of `make_engine`'s engines move `PAGES_PER_COPY` at a time."""
    page_bytes = 2 * 2 * 2 * 4 * 16 * 4  # layers, k and v, heads, tokens, channels, float32
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_pages, "_CHUNK_BYTES", PAGES_PER_COPY * page_bytes)
        yield


def interrupt(engine: Engine, name: str, rng: random.Random) -> None:
    """Pauses, sleeps or flushes, by name, and lets the engine go on."""
    if name == "sleep":
        engine.sleep(1, preserve_state=rng.random() < 0.5)
        engine.wake_up()
        return
    if name == "flush":
        engine.pause_generation("retract")
        engine.flush_cache()
    else:
        assert name == "pause"
        engine.pause_generation(rng.choice(("retract", "in_place")))
    engine.continue_generation()


def wait_until(engine: Engine, holds: Callable[[EngineState], bool]) -> EngineState:
    """Has an engine take steps, which are gated from now on, until something holds of its state."""
    gate_steps(engine)
    deadline = time.monotonic() + LIMIT_S
    while not holds(state := engine.get_internal_state()):
        assert time.monotonic() < deadline, state
        take_steps(engine)
    return state


def start_all(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams = LONG
) -> list[Future[RequestOutput]]:
    """One caller a prompt; returns when all requests have started and have tokens.

    They come between the same two dispatches, so that none is finished before the last has started.
    The engine's steps are gated from now on.
    """
    before = gate_steps(engine).get_internal_state().counters
    with held(engine):
        calls = [
            start(lambda ids=ids: engine.generate_requests([ids], params)[0]) for ids in prompts
        ]
        wait_for(lambda: inside.tasks(engine).qsize() >= len(prompts))
    num = before.num_first_tokens + len(prompts)
    wait_until(engine, lambda state: state.counters.num_first_tokens >= num)
    return calls


def update_in_flight(engine: Engine, source: Any, **options: Any) -> int:
    """Updates weights so that the swap meets the requests that run now, however long it takes.

    The engine's thread is held between two dispatches while the weights are made.
    """
    with held(engine):
        update = start(lambda: engine.update_weights(source, **options))
        wait_for(lambda: not inside.tasks(engine).empty())
    return update.result(LIMIT_S)


def device_bytes() -> int:
    """Bytes of all arrays of this process."""
    return sum(array.nbytes for array in jax.live_arrays())


def results(calls: Sequence[Future[RequestOutput]]) -> list[RequestOutput]:
    """The outputs of all callers."""
    return [call.result(LIMIT_S) for call in calls]


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Output ids of each."""
    return [out.output_ids for out in outputs]


def settle(engine: Engine) -> None:
    """Ends a pause and waits for all requests; then none is left, and every page can be had."""
    engine.continue_generation()
    wait_until(engine, lambda s: s.running_batch_size + s.waiting_queue_size == 0)
    assert_idle(engine)


def assert_idle(engine: Engine) -> None:
    """No request is left, and every page can be had."""
    state = engine.get_internal_state()
    assert state.running_batch_size == state.waiting_queue_size == 0
    assert state.available_kv_tokens == state.total_kv_tokens
    engine.check_integrity()


def assert_stands_still(engine: Engine) -> None:
    """Nothing is dispatched though it might; looks are answered between dispatches."""
    with running():
        before = engine.get_internal_state().counters
        for _ in range(20):
            now = engine.get_internal_state().counters
            assert now.num_dispatches == before.num_dispatches
            assert now.num_output_tokens == before.num_output_tokens
