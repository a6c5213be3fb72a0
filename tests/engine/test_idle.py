"""An engine that waits for its callers leaves the processor alone."""

from __future__ import annotations

import time

import pytest

from sgljax_engine import Engine, SamplingParams
from tests.engine.models import TINY, random_prompts, spread_weights
from tests.geometry import SMALL
from tests.threads import LIMIT_S, gate_steps, start, take_steps

QUICK_COMPILE = "what an idle engine does"

PERIOD_S = 5.0


def cpu_share_while_still() -> float:
    """CPU seconds of all threads of the process for each second of `PERIOD_S`.

    The sleep is the measurement; nothing waits for it.
    """
    started, used = time.perf_counter(), time.process_time()
    time.sleep(PERIOD_S)
    return (time.process_time() - used) / (time.perf_counter() - started)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["retract", "in_place", "wait"])
def test_no_thread_spins_while_paused(mode):
    """With requests that run or wait, and a thread for updates."""
    params = SamplingParams(temperature=0, max_new_tokens=100)
    with Engine(model_config=TINY, weights=spread_weights(), **SMALL) as engine:
        gate_steps(engine)
        engine.update_weights(spread_weights())
        first = start(lambda: engine.generate_requests(random_prompts(16, 1, 20), params))
        while not engine.get_internal_state().running_batch_size:
            take_steps(engine)
        start(lambda: engine.pause_generation(mode)).result(LIMIT_S)
        second = start(lambda: engine.generate_requests(random_prompts(4, 1, 20), params))
        while engine.get_internal_state().counters.num_requests < 20:
            assert not second.done()
        assert cpu_share_while_still() < 0.01
        state = engine.get_internal_state()
        assert state.is_paused
        assert state.running_batch_size + state.waiting_queue_size >= 4
        engine.continue_generation()
        first.result(LIMIT_S)
        second.result(LIMIT_S)
