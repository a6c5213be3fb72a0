"""When a flush of the cache is refused; the specification's cases are in server/test_seed_cases."""

from __future__ import annotations

import pytest

from sgljax_engine import SamplingParams
from tests.engine.interrupts import make_engine
from tests.engine.models import random_prompts

PROMPTS = random_prompts(6, 10, 40)
GREEDY = SamplingParams(temperature=0, max_new_tokens=20)


@pytest.fixture(scope="module")
def engine():
    with make_engine() as engine:
        yield engine


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
