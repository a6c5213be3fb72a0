"""Sleep and wake: the devices' memory is lent away, and no request notices."""

from __future__ import annotations

import gc
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine import EngineStateError, InvalidRequestError, SamplingParams
from sgljax_engine.cache import kv_pages
from sgljax_engine.runner.kv import memory as kv_memory
from tests import inside
from tests.compilation import recorded_programs
from tests.engine.interrupts import (
    LONG,
    assert_idle,
    device_bytes,
    make_engine,
    results,
    settle,
    start_all,
    tokens_of,
    wait_until,
)
from tests.engine.models import random_prompts
from tests.threads import LIMIT_S, start

PROMPTS = random_prompts(4, 5, 30, seed=2)
SHORT = SamplingParams(temperature=0, max_new_tokens=6)
BOTH = ("weights", "kv_cache")


@pytest.fixture
def poison(monkeypatch):
    """Pages that nobody has written hold NaN, so whoever reads them shows it."""

    def allocate(*layers, **shape):
        pages = kv_pages.allocate_kv_pages(*layers, **shape)
        return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), pages)

    monkeypatch.setattr(kv_memory, "allocate_kv_pages", allocate)


@pytest.fixture(scope="module")
def shared():
    with make_engine() as engine:
        engine.warmup()
        yield engine


@pytest.fixture
def engine(shared):
    """Must be left awake and idle."""
    shared.flush_cache()
    yield shared
    assert not shared.is_sleeping()
    settle(shared)


@pytest.fixture(scope="module")
def expected(shared):
    """What the prompts give when nobody interrupts."""
    return [out.output_ids for out in shared.generate_requests(PROMPTS, LONG)]


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
            found = call.result(LIMIT_S)
            after = engine.get_internal_state()
            settle(engine)
        for a, b in zip(found, expected, strict=True):
            assert (a.output_ids, a.logprobs) == (b.output_ids, b.logprobs)
            assert a.num_retractions == 0
        prefilled = after.counters.num_prefill_tokens - before.counters.num_prefill_tokens
        assert prefilled == before.counters.num_prefill_tokens

    def test_the_prefix_cache_stays(self, engine, poison):
        first = engine.generate_requests([PROMPTS[0]], LONG)[0]
        cached = engine.get_internal_state().cached_kv_tokens
        engine.sleep(preserve_state=True)
        engine.wake_up()
        assert engine.get_internal_state().cached_kv_tokens == cached > 0
        again = engine.generate_requests([PROMPTS[0]], LONG)[0]
        assert again.num_cached_tokens > 0
        assert again.output_ids == first.output_ids
        np.testing.assert_allclose(again.logprobs, first.logprobs, atol=1e-4)

    def test_a_prompt_that_is_prefilled_in_part_goes_on(self, poison, monkeypatch):
        """Chunks of it that are done are not done again."""
        (prompt,) = random_prompts(1, 200, 200)
        with make_engine(chunked_prefill_size=16) as engine:
            (whole,) = engine.generate_requests([prompt], SHORT)
            engine.flush_cache()
            engine.pause_generation("retract")
            call = start(lambda: engine.generate_requests([prompt], SHORT)[0])
            wait_until(engine, lambda s: s.waiting_queue_size == 1)
            before = engine.get_internal_state().counters.num_prefill_tokens
            core = inside.core(engine)
            real, steps = core.step, []

            def step():
                real()
                steps.append(None)
                if len(steps) == 5:  # as a pause that comes right behind this chunk
                    core.pauses.mode = "in_place"

            monkeypatch.setattr(core, "step", step)
            engine.continue_generation()
            state = wait_until(engine, lambda s: s.pause_mode == "in_place")
            assert state.num_prefilling == 1
            done = state.counters.num_prefill_tokens - before
            assert 0 < done < len(prompt) - 1
            engine.sleep(2, preserve_state=True)
            engine.wake_up()
            engine.continue_generation()
            assert call.result(LIMIT_S).output_ids == whole.output_ids
            state = engine.get_internal_state()
            assert state.counters.num_prefill_tokens - before == len(prompt) - 1

    @pytest.mark.slow
    def test_bfloat16(self):
        """numpy has no such dtype of its own."""
        with make_engine(dtype="bfloat16") as engine:
            whole = engine.generate_requests(PROMPTS, LONG)
            calls = start_all(engine, PROMPTS)
            engine.sleep(preserve_state=True)
            engine.wake_up()
            found = results(calls)
            engine.sleep(level=1)
            engine.wake_up()
            again = engine.generate_requests(PROMPTS, LONG)
        assert tokens_of(found) == tokens_of(again) == tokens_of(whole)
        assert [out.logprobs for out in again] == [out.logprobs for out in whole]
        assert [out.num_retractions for out in found] == [0] * 4

    @pytest.mark.parametrize("preserve_state", [True, False])
    def test_pinned_memory(self, monkeypatch, poison, preserve_state):
        """As on accelerators; CPU devices have memory of that kind, too."""
        with make_engine() as engine:
            whole = tokens_of(engine.generate_requests(PROMPTS, LONG))
            runner = inside.runner(engine)
            for part in (runner, runner.kv_memory):
                monkeypatch.setattr(part, "_host_memory", "pinned_host")
            calls = start_all(engine, PROMPTS)
            for cycle in range(3):
                engine.sleep(preserve_state=preserve_state)
                kept = inside.core(engine).sleep_manager._copies
                assert kept.weights is not None
                for name in kept.weights:
                    pinned = kept.weights[name].beside
                    assert pinned is not None
                    assert pinned.sharding.memory_kind == "pinned_host"
                del kept
                engine.wake_up()
                for weight in inside.runner(engine).weights.values():
                    assert weight.sharding.memory_kind == "device"
                if cycle < 2:
                    num = engine.get_internal_state().counters.num_output_tokens
                    wait_until(engine, lambda s, n=num: s.counters.num_output_tokens > n)
            assert tokens_of(results(calls)) == whole
            assert_idle(engine)


class TestDroppedState:
    def test_requests_are_retracted_and_end_with_the_same_tokens(self, engine, expected, poison):
        calls = start_all(engine, PROMPTS)
        busy = engine.get_internal_state()
        engine.sleep()
        state = engine.get_internal_state()
        assert (state.running_batch_size, state.waiting_queue_size) == (0, 4)
        assert state.waiting_rids == busy.running_rids
        assert state.asleep == BOTH
        assert state.is_sleeping
        assert not state.has_weights
        assert not state.is_kv_allocated
        assert not state.is_paused
        assert state.cached_kv_tokens == 0
        assert state.available_kv_tokens == state.total_kv_tokens
        engine.check_integrity()
        engine.wake_up()
        outputs = results(calls)
        assert tokens_of(outputs) == expected
        assert [out.num_retractions for out in outputs] == [1] * 4

    def test_the_prefix_cache_is_empty(self, engine, poison):
        first = engine.generate_requests([PROMPTS[0]], SHORT)[0]
        assert engine.generate_requests([PROMPTS[0]], SHORT)[0].num_cached_tokens > 0
        engine.sleep()
        engine.wake_up()
        again = engine.generate_requests([PROMPTS[0]], SHORT)[0]
        assert again.num_cached_tokens == 0
        assert (again.output_ids, again.logprobs) == (first.output_ids, first.logprobs)


class TestStagedWake:
    @pytest.mark.parametrize("preserve_state", [True, False])
    @pytest.mark.parametrize("order", [BOTH, BOTH[::-1]])
    def test_nothing_runs_until_nothing_sleeps(
        self, engine, expected, poison, order, preserve_state
    ):
        calls = start_all(engine, PROMPTS)
        freed = engine.sleep(preserve_state=preserve_state)
        empty = device_bytes()
        before = engine.get_internal_state()
        first = engine.wake_up([order[0]])
        assert device_bytes() == empty + first
        assert 0 < first < freed
        state = engine.get_internal_state()
        assert state.asleep == (order[1],)
        assert engine.is_sleeping()
        assert state.has_weights == (order[0] == "weights")
        assert state.is_kv_allocated == (order[0] == "kv_cache")
        for refused in (lambda: engine.score([[1, 2]]), engine.warmup, engine.get_weights_checksum):
            with pytest.raises(EngineStateError, match=rf"sleeps \(\['{order[1]}'\]\); wake_up"):
                refused()
        late = start(lambda: engine.generate_requests([[1, 2]], SHORT)[0])
        waiting = before.waiting_queue_size + 1
        state = wait_until(engine, lambda s: s.waiting_queue_size == waiting)
        assert state.counters.num_dispatches == before.counters.num_dispatches
        assert first + engine.wake_up((order[1],)) == freed
        assert not engine.is_sleeping()
        outputs = results(calls)
        assert tokens_of(outputs) == expected
        assert {out.num_retractions for out in outputs} == {0 if preserve_state else 1}
        assert len(late.result(LIMIT_S).output_ids) == 6
        assert engine.get_internal_state().host_bytes == 0

    def test_each_copy_goes_with_its_tag(self, engine):
        engine.generate_requests(PROMPTS, SHORT)
        engine.sleep(preserve_state=True)
        both = engine.get_internal_state().host_bytes
        engine.wake_up({"weights"})
        pages = engine.get_internal_state().host_bytes
        assert both - pages == engine.get_internal_state().memory.weights_bytes
        assert pages > 0
        engine.wake_up(BOTH)
        assert engine.get_internal_state().host_bytes == 0


def unchanged(state):
    """All that a call without effect must leave."""
    return (
        state.asleep,
        state.host_bytes,
        state.has_weights,
        state.running_rids,
        state.waiting_rids,
        state.cached_kv_tokens,
        state.is_kv_allocated,
        state.counters.num_sleeps,
        state.counters.num_dispatches,
    )


class TestWithoutEffect:
    @pytest.mark.parametrize("level", [1, 2])
    @pytest.mark.parametrize("preserve_state", [True, False])
    def test_sleep_when_asleep(self, engine, expected, caplog, level, preserve_state):
        calls = start_all(engine, PROMPTS)
        engine.sleep(preserve_state=True)
        before, memory = engine.get_internal_state(), device_bytes()
        with caplog.at_level(logging.WARNING, "sgljax_engine"):
            assert engine.sleep(level, preserve_state, refuse_requests=True) == 0
        assert [r.getMessage() for r in caplog.records] == [
            "sleep: the engine sleeps already; nothing was changed"
        ]
        assert unchanged(engine.get_internal_state()) == unchanged(before)
        assert device_bytes() == memory
        late = start(lambda: engine.generate_requests([[1, 2]], SHORT)[0])
        wait_until(engine, lambda s: s.waiting_queue_size == 1)  # not refused
        engine.wake_up()
        assert tokens_of(results(calls)) == expected
        late.result(LIMIT_S)

    @pytest.mark.parametrize("tags", [None, ["weights"], ["kv_cache"], BOTH])
    def test_wake_up_when_awake(self, engine, expected, caplog, tags):
        calls = start_all(engine, PROMPTS)
        with caplog.at_level(logging.WARNING, "sgljax_engine"):
            assert engine.wake_up(tags) == 0
        (record,) = caplog.records
        assert record.getMessage() == (
            f"wake_up: {list(BOTH if tags is None else tags)} is awake; nothing was changed"
        )
        outputs = results(calls)
        assert tokens_of(outputs) == expected
        assert {out.num_retractions for out in outputs} == {0}

    def test_wake_up_of_what_is_awake(self, engine, caplog):
        engine.sleep()
        engine.wake_up(["kv_cache"])
        before = engine.get_internal_state()
        with caplog.at_level(logging.WARNING, "sgljax_engine"):
            assert engine.wake_up(["kv_cache"]) == 0
        assert len(caplog.records) == 1
        assert unchanged(engine.get_internal_state()) == unchanged(before)
        engine.wake_up()


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            *(
                ({"level": level}, r"level must be one of \(1, 2\), got ")
                for level in (0, 3, -1, True, False, "1", None, 1.5, [1])
            ),
            *(({"preserve_state": v}, "preserve_state must be True or False") for v in (1, None)),
            *(({"refuse_requests": v}, "refuse_requests must be True or False") for v in (0, "")),
        ],
    )
    def test_bad_ones_of_sleep(self, engine, arguments, message):
        with pytest.raises(InvalidRequestError, match=message):
            engine.sleep(**arguments)
        assert not engine.is_sleeping()

    @pytest.mark.parametrize(
        "tags", ["weights", "", [], (), ["x"], ["weights", "x"], [None], [["weights"]], 1, True]
    )
    def test_bad_tags(self, engine, tags):
        engine.sleep()
        try:
            with pytest.raises(InvalidRequestError, match="tags must be None or a list of"):
                engine.wake_up(tags)
            assert engine.get_internal_state().asleep == BOTH
        finally:
            engine.wake_up()


class TestMemory:
    def test_devices_are_as_empty_as_before_the_engine(self):
        gc.collect()  # what others left must not go away in between
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
            assert len(engine.generate_requests(prompts, LONG)) == 4

    def test_cycles_compile_nothing(self):
        with make_engine(forbid_compile=True) as engine:
            engine.warmup()
            whole = tokens_of(engine.generate_requests(PROMPTS, LONG))
            num_compiles = engine.get_internal_state().num_compiles
            with recorded_programs() as lowered:
                for cycle in range(4):
                    engine.flush_cache()
                    calls = start_all(engine, PROMPTS)
                    engine.sleep(1 + cycle // 2, preserve_state=cycle > 0)
                    engine.wake_up(["kv_cache"] if cycle % 2 else None)
                    engine.wake_up()
                    assert tokens_of(results(calls)) == whole
            assert not lowered
            assert engine.get_internal_state().num_compiles == num_compiles
