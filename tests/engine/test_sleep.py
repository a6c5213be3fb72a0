"""Sleep and wake: the devices' memory is lent away, and no request notices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from sgljax_engine import SamplingParams
from sgljax_engine.cache import kv_pages
from sgljax_engine.runner import runner
from tests.engine.interrupts import LONG, make_engine, results, settle, wait_until
from tests.engine.models import random_prompts
from tests.threads import start


def device_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.fixture
def poison(monkeypatch):
    """Pages that nobody has written hold NaN, so whoever reads them shows it."""

    def allocate(**shape):
        pages = kv_pages.allocate_kv_pages(**shape)
        return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), pages)

    monkeypatch.setattr(runner, "allocate_kv_pages", allocate)


class TestPreservedState:
    @pytest.mark.parametrize("level", [1, 2])
    def test_64_requests_go_on_where_they_were(self, poison, level):
        """Same tokens and log-probs, bit for bit, without a prefill."""
        prompts = random_prompts(64, 3, 30)
        params = [SamplingParams(temperature=0, max_new_tokens=20 + i % 40) for i in range(64)]
        options = {"max_running_requests": 64, "batch_buckets": (64,), "num_kv_tokens": 8000}
        with make_engine(**options) as engine:
            expected = engine.generate_requests(prompts, params)
            engine.flush_cache()
            before = engine.get_internal_state()
            call = start(lambda: engine.generate_requests(prompts, params))
            num = before.counters.num_first_tokens + 64
            wait_until(engine, lambda s: s.counters.num_first_tokens >= num)

            engine.sleep(level, preserve_state=True)
            asleep = engine.get_internal_state()
            assert asleep.running_batch_size > 32
            assert asleep.cached_kv_tokens > 0
            assert asleep.host_bytes > 0
            engine.check_integrity()
            engine.wake_up()
            found = call.result(60)
            after = engine.get_internal_state()
            settle(engine)
        for a, b in zip(found, expected, strict=True):
            assert (a.output_ids, a.logprobs) == (b.output_ids, b.logprobs)
            assert a.num_retractions == 0
        prefilled = after.counters.num_prefill_tokens - before.counters.num_prefill_tokens
        assert prefilled == before.counters.num_prefill_tokens


class TestMemory:
    def test_devices_are_as_empty_as_before_the_engine(self):
        base = device_bytes()
        prompts = random_prompts(4, 3, 30)
        with make_engine() as engine:
            engine.generate_requests(prompts, LONG)
            awake = device_bytes()
            assert awake > base
            for cycle in range(50):
                freed = engine.sleep(1 + cycle % 2, preserve_state=cycle % 3 > 0 or cycle % 2 == 1)
                assert freed == awake - base
                assert device_bytes() == base
                assert engine.wake_up() == freed
                assert device_bytes() == awake
            assert results([start(lambda: engine.generate_requests(prompts, LONG))])
