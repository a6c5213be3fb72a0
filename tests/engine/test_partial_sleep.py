"""Going to sleep again from a sleep that was ended in part; what sleep keeps after the end."""

from __future__ import annotations

import gc

import pytest

from tests import inside
from tests.engine.interrupts import LONG, device_bytes, make_engine, results, start_all, wait_until
from tests.engine.models import random_prompts, spread_weights

PROMPTS = random_prompts(4, 3, 30)


@pytest.mark.parametrize("level", [1, 2])
def test_updated_weights_go_to_sleep_beside_a_kv_cache_that_sleeps(level, caplog):
    """As a trainer does that updates an engine while it needs the device itself."""
    source = spread_weights(seed=9)
    gc.collect()  # what earlier tests left
    base = device_bytes()
    with make_engine(weights=source) as other:
        expected = [out.output_ids for out in other.generate_requests(PROMPTS, LONG)]
    with make_engine() as engine:
        engine.generate_requests(PROMPTS, LONG)
        num_bytes = engine.sleep(level)
        engine.update_weights(source)
        assert engine.get_internal_state().asleep == ("kv_cache",)
        weights_bytes = engine.get_internal_state().memory.weights_bytes
        assert engine.sleep() == weights_bytes
        assert engine.get_internal_state().asleep == ("weights", "kv_cache")
        assert device_bytes() == base
        assert engine.wake_up() == num_bytes
        assert [out.output_ids for out in engine.generate_requests(PROMPTS, LONG)] == expected
        assert not caplog.records
        engine.check_integrity()


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
@pytest.mark.parametrize("preserve_again", [True, False])
def test_requests_go_on_after_a_second_sleep(tag, preserve_again):
    """What slept on keeps what it kept, whatever is asked for the rest."""
    with make_engine() as engine:
        expected = [out.output_ids for out in engine.generate_requests(PROMPTS, LONG)]
        calls = start_all(engine, PROMPTS)
        engine.sleep(preserve_state=True)
        engine.wake_up([tag])
        assert engine.sleep(preserve_state=preserve_again) > 0
        assert engine.get_internal_state().asleep == ("weights", "kv_cache")
        engine.check_integrity()
        engine.wake_up()
        outputs = results(calls)
        assert [out.output_ids for out in outputs] == expected
        # Only pages that were awake and not to be kept are prefilled again.
        is_retracted = tag == "kv_cache" and not preserve_again
        assert {out.num_retractions > 0 for out in outputs} == {is_retracted}
        wait_until(engine, lambda state: not state.running_batch_size)
        engine.check_integrity()


def test_shutdown_lets_go_of_what_sleep_kept():
    engine = make_engine()
    engine.sleep()
    sleep_manager = inside.core(engine).sleep_manager
    assert sleep_manager.host_bytes > 0
    engine.shutdown()
    assert sleep_manager.host_bytes == 0
