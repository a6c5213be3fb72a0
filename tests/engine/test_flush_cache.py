"""When a flush of the cache is refused; the specification's cases are in server/test_seed_cases."""

from __future__ import annotations

import pytest

from sgljax_engine import SamplingParams
from tests.engine.interrupts import NUM_TOKENS, make_engine, results, start_all
from tests.engine.models import random_prompts

PROMPTS = random_prompts(6, 10, 40)
GREEDY = SamplingParams(temperature=0, max_new_tokens=20)


@pytest.fixture(scope="module")
def engine():
    with make_engine() as engine:
        yield engine


class TestWithRequests:
    def test_is_refused_while_they_run_in_place(self, engine):
        calls = start_all(engine, PROMPTS[:3])
        engine.pause_generation("in_place")
        before = engine.get_internal_state()
        answer = engine.flush_cache()
        assert not answer.success
        assert answer.flushed_items == 0
        assert answer.error_msg.startswith("3 running request(s) hold KV pages; pause_generation")
        after = engine.get_internal_state()
        assert after.counters.pause_s > before.counters.pause_s, "the pause goes on"
        after.counters.pause_s = before.counters.pause_s
        assert after == before
        engine.continue_generation()
        assert all(out.num_retractions == 0 for out in results(calls))

    def test_is_legal_while_they_wait_retracted(self, engine):
        calls = start_all(engine, PROMPTS[:3])
        engine.pause_generation("retract")
        assert engine.get_internal_state().cached_kv_tokens > 0
        assert engine.flush_cache().flushed_items > 0
        state = engine.get_internal_state()
        assert state.cached_kv_tokens == 0
        assert state.available_kv_tokens == state.total_kv_tokens
        assert state.waiting_queue_size == 3
        engine.continue_generation()
        assert all(len(out.output_ids) == NUM_TOKENS for out in results(calls))


class TestReleaseKV:
    def test_memory_comes_back_at_the_next_dispatch(self, engine):
        before = engine.generate_requests(PROMPTS, GREEDY)
        num_compiles = engine.get_internal_state().num_compiles
        memory = engine.get_internal_state().memory
        assert engine.release_kv_cache() == memory.kv_bytes > 0
        state = engine.get_internal_state()
        assert not state.is_kv_allocated
        assert state.cached_kv_tokens == 0
        assert engine.release_kv_cache() == 0
        assert engine.score([[1, 2, 3]])[0].shape == (2,)
        assert not engine.get_internal_state().is_kv_allocated
        after = engine.generate_requests(PROMPTS, GREEDY)
        assert [out.output_ids for out in after] == [out.output_ids for out in before]
        state = engine.get_internal_state()
        assert state.is_kv_allocated
        assert state.num_compiles <= num_compiles + 1  # score's

    def test_is_refused_while_requests_hold_pages(self, engine):
        calls = start_all(engine, PROMPTS[:2])
        engine.pause_generation("in_place")
        with pytest.raises(Exception, match=r"2 running request\(s\) hold KV pages"):
            engine.release_kv_cache()
        engine.pause_generation("retract")
        assert engine.release_kv_cache() > 0
        engine.continue_generation()
        assert all(len(out.output_ids) == NUM_TOKENS for out in results(calls))
