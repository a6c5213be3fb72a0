"""What fails on the way to sleep or back changes nothing, and costs no request anything."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from sgljax_engine import OffloadError
from sgljax_engine.runner import runner
from sgljax_engine.runner.kv import kv_memory
from tests import inside
from tests.engine.interrupts import (
    LONG,
    assert_idle,
    device_bytes,
    make_engine,
    results,
    settle,
    small_copies,
    start_all,
)
from tests.engine.models import random_prompts, spread_weights
from tests.threads import take_steps

PROMPTS = random_prompts(4, 5, 30, seed=2)
BOTH = ("weights", "kv_cache")


@pytest.fixture(scope="module")
def shared():
    """Pages move in chunks of four."""
    with small_copies(), make_engine() as engine:
        engine.warmup()
        assert inside.runner(engine).kv_memory.pages_per_copy == 4
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
    """What the prompts give when nobody interrupts, with their log-probs."""
    return [(out.output_ids, out.logprobs) for out in shared.generate_requests(PROMPTS, LONG)]


@pytest.fixture
def plant(monkeypatch):
    """Makes the k-th call of an object's method fail, or of a function that the runner's modules
    import; returns its calls."""

    def fail(owner, name, k, error):
        owners = [owner]
        if owner is None:
            owners = [module for module in (runner, kv_memory) if name in vars(module)]
        real, count = getattr(owners[0], name), []

        def sometimes(*args, **kwargs):
            count.append(None)
            if len(count) == k:
                raise error
            return real(*args, **kwargs)

        for each in owners:
            monkeypatch.setattr(each, name, sometimes)
        return count

    return fail


def assert_same(outputs, expected):
    """Requests of several callers begin in other batches, which round otherwise."""
    assert [out.output_ids for out in outputs] == [ids for ids, _ in expected]
    for out, (_, logprobs) in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(out.logprobs, logprobs, atol=1e-4)
    assert [out.num_retractions for out in outputs] == [0] * 4


def assert_untouched(calls, expected, engine, prefilled):
    """The same answers, and nothing was done twice."""
    assert_same(results(calls), expected)
    assert engine.get_internal_state().counters.num_prefill_tokens == prefilled
    assert_idle(engine)


def buffer_bytes():
    """Bytes of an idle process; `device_bytes` counts shards that were looked at twice."""
    return sum({x.unsafe_buffer_pointer(): x.nbytes for x in jax.live_arrays()}.values())


def look(engine):
    """What a failure must leave."""
    state = engine.get_internal_state()
    return (
        state.asleep,
        state.host_bytes,
        state.has_weights,
        state.is_kv_allocated,
        state.running_rids,
        state.waiting_rids,
        state.cached_kv_tokens,
        state.counters.num_sleeps,
        state.weight_version,
        device_bytes(),
    )


class TestSleep:
    @pytest.mark.parametrize(
        ("name", "k", "preserve_state", "level", "error"),
        [
            ("to_host", 1, False, 1, RuntimeError),  # weights
            ("to_host", 1, True, 2, MemoryError),
            ("to_host", 2, True, 1, RuntimeError),  # the first chunk of pages
            ("to_host", 5, True, 2, MemoryError),
            ("chunk_ids", 1, True, 1, RuntimeError),
        ],
    )
    def test_leaves_the_engine_awake(
        self, engine, expected, plant, name, k, preserve_state, level, error
    ):
        memory = buffer_bytes()
        calls = start_all(engine, PROMPTS)
        counters = engine.get_internal_state().counters
        prefilled, num_sleeps = counters.num_prefill_tokens, counters.num_sleeps
        count = plant(None, name, k, error("planted fault"))
        with pytest.raises(OffloadError, match=r"planted fault.*; nothing has changed") as caught:
            engine.sleep(level, preserve_state, refuse_requests=True)
        assert isinstance(caught.value.__cause__, error)
        assert len(count) == k
        assert not engine.is_sleeping()
        state = engine.get_internal_state()
        assert (state.asleep, state.host_bytes, state.has_weights) == ((), 0, True)
        assert state.counters.num_sleeps == num_sleeps
        late = engine.generate_requests([PROMPTS[0]], LONG)[0]  # not refused
        assert late.output_ids == expected[0][0]
        assert_same(results(calls), expected)
        more = engine.get_internal_state().counters.num_prefill_tokens - prefilled
        assert more == len(PROMPTS[0]) - 1 - late.num_cached_tokens
        assert_idle(engine)
        assert buffer_bytes() == memory

    def test_the_program_that_reads_pages(self, engine, expected, plant):
        calls = start_all(engine, PROMPTS)
        prefilled = engine.get_internal_state().counters.num_prefill_tokens
        engine.pause_generation("in_place")
        programs = inside.runner(engine).programs
        plant(programs, "run_program", 3, RuntimeError("planted fault"))
        before = look(engine)
        with pytest.raises(OffloadError, match="planted fault"):
            engine.sleep(preserve_state=True)
        assert look(engine) == before
        engine.sleep(preserve_state=True)
        engine.wake_up()
        engine.continue_generation()
        assert_untouched(calls, expected, engine, prefilled)


def assert_it_sleeps_on(engine, expected, plant, fault, tags):
    """It is put to sleep, and cannot be woken at first."""
    name, k, error = fault
    calls = start_all(engine, PROMPTS)
    take_steps(engine, 8)  # so that there are pages enough for several copies
    prefilled = engine.get_internal_state().counters.num_prefill_tokens
    engine.sleep(2, preserve_state=True)
    before = look(engine)
    owner = inside.runner(engine).programs if name == "run_program" else None
    count = plant(owner, name, k, error("planted fault"))
    with pytest.raises(OffloadError, match=r"planted fault.* sleeps on") as caught:
        engine.wake_up(tags)
    assert len(count) == k
    assert isinstance(caught.value.__cause__, error)
    assert look(engine) == before
    engine.check_integrity()
    engine.wake_up(tags)
    if tags is not None:
        assert engine.is_sleeping()
        engine.wake_up()
    assert_untouched(calls, expected, engine, prefilled)
    assert engine.get_internal_state().host_bytes == 0


class TestWakeUp:
    @pytest.mark.parametrize(
        ("fault", "tags"),
        [
            (("to_device", 1, RuntimeError), None),
            (("to_device", 2, MemoryError), ["kv_cache"]),
            (("to_device", 6, RuntimeError), None),
            (("allocate_kv_pages", 1, MemoryError), ["kv_cache"]),
            (("run_program", 1, RuntimeError), None),
            (("run_program", 4, MemoryError), ["kv_cache"]),
        ],
    )
    def test_sleeps_on_and_can_be_tried_again(self, engine, expected, plant, fault, tags):
        assert_it_sleeps_on(engine, expected, plant, fault, tags)

    def test_weights_alone(self, engine, expected, plant):
        """They are one load, and the first one."""
        fault = ("to_device", 1, RuntimeError)
        assert_it_sleeps_on(engine, expected, plant, fault, ["weights"])

    @pytest.mark.parametrize("order", [BOTH, BOTH[::-1]])
    def test_what_is_awake_stays_awake(self, engine, expected, plant, order):
        """The second half fails, and the first is not lost for it."""
        calls = start_all(engine, PROMPTS)
        prefilled = engine.get_internal_state().counters.num_prefill_tokens
        engine.sleep(preserve_state=True)
        engine.wake_up([order[0]])
        before = look(engine)
        plant(None, "to_device", 1, RuntimeError("planted fault"))
        with pytest.raises(OffloadError, match=rf"memory of \['{order[1]}'\] failed"):
            engine.wake_up()
        assert look(engine) == before
        assert engine.get_internal_state().asleep == (order[1],)
        engine.wake_up()
        assert_untouched(calls, expected, engine, prefilled)

    def test_without_kept_pages(self, engine, expected, plant):
        calls = start_all(engine, PROMPTS)
        engine.sleep()
        before = look(engine)
        plant(None, "allocate_kv_pages", 1, RuntimeError("planted fault"))
        with pytest.raises(OffloadError, match="planted fault"):
            engine.wake_up()
        assert look(engine) == before
        engine.wake_up()
        assert [out.output_ids for out in results(calls)] == [ids for ids, _ in expected]

    def test_a_write_that_fails_after_it_took_the_pages(self, engine, expected, monkeypatch):
        """Donated pages are gone; none are left half-restored."""
        calls = start_all(engine, PROMPTS)
        prefilled = engine.get_internal_state().counters.num_prefill_tokens
        engine.sleep(preserve_state=True)
        before = look(engine)
        core, count = inside.core(engine), []
        real = core.runner.programs.run_program

        def run(call, state):
            count.append(None)
            if len(count) == 3:
                for page in jax.tree.leaves(state.kv):
                    page.delete()
                raise RuntimeError("planted fault")
            return real(call, state)

        with monkeypatch.context() as patch:
            patch.setattr(core.runner.programs, "run_program", run)
            with pytest.raises(OffloadError, match="planted fault"):
                engine.wake_up()
        assert look(engine) == before
        engine.wake_up()
        assert_untouched(calls, expected, engine, prefilled)

    def test_an_update_heals_it_too(self, engine, expected, plant):
        """Weights that cannot be restored may come from elsewhere."""
        calls = start_all(engine, PROMPTS)
        engine.sleep(preserve_state=True)
        plant(None, "to_device", 1, RuntimeError("planted fault"))
        with pytest.raises(OffloadError):
            engine.wake_up()
        engine.update_weights(spread_weights(), mode="in_place")
        engine.wake_up()
        assert_same(results(calls), expected)


class TestWarmup:
    def test_that_loses_the_pages_costs_running_requests_nothing(
        self, engine, expected, monkeypatch
    ):
        """Its last part writes a page; what fails there leaves none."""
        calls = start_all(engine, PROMPTS)
        engine.pause_generation("in_place")

        def fail(_):
            raise RuntimeError("planted fault")

        with monkeypatch.context() as patch:
            patch.setattr(kv_memory, "to_device", fail)
            with pytest.raises(RuntimeError, match="planted fault"):
                engine.warmup()
        engine.continue_generation()
        outputs = results(calls)
        assert [out.output_ids for out in outputs] == [ids for ids, _ in expected]
        assert [out.num_retractions for out in outputs] == [1] * 4
