"""Sleep and wake: the devices' memory is lent away, and no request notices.

The file is long because one engine serves most of it; `test_sleep_faults` has what fails,
`test_sleep_updates` weights that were given up, or come meanwhile.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine import (
    EngineShutdownError,
    EngineStateError,
    InvalidRequestError,
    SamplingParams,
)
from sgljax_engine.cache import kv_pages
from sgljax_engine.runner.kv import kv_memory
from tests import inside
from tests.engine.interrupts import (
    LONG,
    NUM_TOKENS,
    assert_idle,
    assert_stands_still,
    device_bytes,
    make_engine,
    results,
    settle,
    small_copies,
    start_all,
    tokens_of,
    wait_until,
)
from tests.engine.models import random_prompts, spread_weights
from tests.engine.small_tokenizers import CharTokenizer
from tests.geometry import WIDE
from tests.threads import LIMIT_S, first_piece, running, start, take_steps

OLD, NEW = spread_weights(), spread_weights(seed=1)
PROMPTS = random_prompts(4, 5, 30, seed=2)
SHORT = SamplingParams(temperature=0, max_new_tokens=6)
GREEDY = {"temperature": 0, "max_new_tokens": NUM_TOKENS}
BOTH = ("weights", "kv_cache")


class Chars(CharTokenizer):
    """Nothing ends its texts."""

    def eos_id(self) -> Any:
        return None


@pytest.fixture
def poison(monkeypatch):
    """Pages that nobody has written hold NaN, so whoever reads them shows it."""

    def allocate(*layers, **shape):
        pages = kv_pages.allocate_kv_pages(*layers, **shape)
        return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), pages)

    monkeypatch.setattr(kv_memory, "allocate_kv_pages", allocate)


@pytest.fixture(scope="module")
def shared():
    with make_engine(tokenizer=Chars()) as engine:
        with small_copies():
            engine.warmup()
        yield engine


@pytest.fixture
def engine(shared):
    """Serves the old weights; its pages move a few at a time. Must be left awake and idle."""
    with small_copies():
        shared.update_weights(OLD)
        yield shared
        assert not shared.is_sleeping()
        settle(shared)


@pytest.fixture(scope="module")
def expected(shared):
    """What the prompts give under the old weights when nobody interrupts."""
    shared.update_weights(OLD)
    return [out.output_ids for out in shared.generate_requests(PROMPTS, LONG)]


@pytest.fixture(scope="module")
def crowd():
    """An engine for many requests at once."""
    with make_engine(**WIDE) as engine:
        yield engine


class TestPreservedState:
    def test_64_requests_go_on_where_they_were(self, crowd, poison):
        """Same tokens and log-probs, bit for bit, without a prefill."""
        prompts = random_prompts(64, 3, 30)
        params = [SamplingParams(temperature=0, max_new_tokens=100 + i % 40) for i in range(64)]
        crowd.flush_cache()
        first = crowd.get_internal_state().counters
        expected = crowd.generate_requests(prompts, params)
        crowd.flush_cache()
        before = crowd.get_internal_state().counters
        call = start(lambda: crowd.generate_requests(prompts, params))
        num = before.num_first_tokens + 64
        wait_until(crowd, lambda s: s.counters.num_first_tokens >= num)

        crowd.sleep(2, preserve_state=True)
        asleep = crowd.get_internal_state()
        assert asleep.running_batch_size > 32
        assert asleep.cached_kv_tokens > 0
        assert asleep.host_bytes > 0
        crowd.check_integrity()
        crowd.wake_up()
        found = call.result(LIMIT_S)
        after = crowd.get_internal_state().counters
        settle(crowd)
        for a, b in zip(found, expected, strict=True):
            assert (a.output_ids, a.logprobs) == (b.output_ids, b.logprobs)
            assert a.num_retractions == 0
        prefilled = before.num_prefill_tokens - first.num_prefill_tokens
        assert after.num_prefill_tokens - before.num_prefill_tokens == prefilled

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

    def test_a_prompt_that_is_prefilled_in_part_goes_on(self, engine, poison):
        """Chunks of it that are done are not done again."""
        (prompt,) = random_prompts(1, 200, 200)
        (whole,) = engine.generate_requests([prompt], SHORT)
        engine.flush_cache()
        before = engine.get_internal_state().counters.num_prefill_tokens
        call = start(lambda: engine.generate_requests([prompt], SHORT)[0])
        state = wait_until(engine, lambda s: s.counters.num_prefill_tokens > before)
        assert state.num_prefilling == 1
        assert state.counters.num_prefill_tokens - before < len(prompt) - 1
        engine.sleep(2, preserve_state=True)
        engine.wake_up()
        assert call.result(LIMIT_S).output_ids == whole.output_ids
        state = engine.get_internal_state()
        assert state.counters.num_prefill_tokens - before == len(prompt) - 1

    def test_pinned_memory(self, engine, expected, monkeypatch, poison):
        """As on accelerators; CPU devices have memory of that kind, too."""
        runner = inside.runner(engine)
        for part in (runner, runner.kv_memory):
            monkeypatch.setattr(part, "_host_memory", "pinned_host")
        calls = start_all(engine, PROMPTS)
        for cycle in range(3):
            engine.sleep(preserve_state=True)
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
        assert tokens_of(results(calls)) == expected
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
    @pytest.mark.parametrize(("order", "preserve_state"), [(BOTH, True), (BOTH[::-1], False)])
    def test_nothing_runs_until_nothing_sleeps(
        self, engine, expected, poison, order, preserve_state
    ):
        calls = start_all(engine, PROMPTS)
        freed = engine.sleep(preserve_state=preserve_state)
        empty = device_bytes()
        late = start(lambda: engine.generate_requests([[1, 2]], SHORT)[0])
        waiting = 1 if preserve_state else 5
        before = wait_until(engine, lambda s: s.waiting_queue_size == waiting)
        assert_stands_still(engine)
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
        assert_stands_still(engine)
        assert not late.done()
        num_dispatches = engine.get_internal_state().counters.num_dispatches
        assert num_dispatches == before.counters.num_dispatches
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
    def test_sleep_when_asleep(self, engine, expected, caplog):
        calls = start_all(engine, PROMPTS)
        engine.sleep(preserve_state=True)
        before, memory = engine.get_internal_state(), device_bytes()
        with caplog.at_level(logging.WARNING, "sgljax_engine"):
            assert engine.sleep(2, refuse_requests=True) == 0
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

    def test_wake_up_when_awake(self, engine, expected, caplog):
        calls = start_all(engine, PROMPTS)
        with caplog.at_level(logging.WARNING, "sgljax_engine"):
            assert engine.wake_up(["kv_cache"]) == 0
        (record,) = caplog.records
        assert record.getMessage() == "wake_up: ['kv_cache'] is awake; nothing was changed"
        outputs = results(calls)
        assert tokens_of(outputs) == expected
        assert {out.num_retractions for out in outputs} == {0}


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            *(
                ({"level": level}, r"level must be one of \(1, 2\), got ")
                for level in (3, True, None)
            ),
            ({"preserve_state": 1}, "preserve_state must be True or False"),
            ({"refuse_requests": ""}, "refuse_requests must be True or False"),
        ],
    )
    def test_bad_ones_of_sleep(self, engine, arguments, message):
        with pytest.raises(InvalidRequestError, match=message):
            engine.sleep(**arguments)
        assert not engine.is_sleeping()

    @pytest.mark.parametrize("tags", ["weights", [], ["weights", "x"], [None], True])
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
            for cycle in range(12):
                freed = engine.sleep(1 + cycle % 2, preserve_state=cycle % 3 > 0 or cycle % 2 == 1)
                assert freed == awake - base
                assert device_bytes() == base
                assert engine.wake_up() == freed
                assert device_bytes() == awake
            assert len(engine.generate_requests(prompts, LONG)) == 4


class TestNewRequests:
    def test_ids_are_not_taken_by_refused_ones(self, engine):
        engine.sleep(refuse_requests=True)
        with pytest.raises(EngineStateError, match="engine sleeps"):
            engine.generate(None, GREEDY, [1, 2], rid="a")
        engine.wake_up()
        assert engine.generate(None, GREEDY, [1, 2], rid="a")["meta_info"]["id"] == "a"


class TestWhatRequestsGet:
    def test_a_stop_string_that_spans_sleep(self, engine):
        """Text goes on where it was: half of the stop string comes before, half after."""
        params = {"temperature": 1.0, "seed": 7, "max_new_tokens": NUM_TOKENS}
        text = engine.generate(None, params, PROMPTS[1])["text"]
        stream = engine.generate(None, params, PROMPTS[1], stream=True)
        num_before = len(first_piece(stream)["text"])
        stream.close()
        stop = text[num_before - 1 : num_before + 3]
        assert text.index(stop) == num_before - 1
        stream = engine.generate(None, params | {"stop": [stop]}, PROMPTS[1], stream=True)
        pieces = [first_piece(stream)]
        engine.sleep()
        engine.wake_up()
        pieces.extend(start(lambda: list(stream)).result(LIMIT_S))
        assert "".join(piece["text"] for piece in pieces) == text[: num_before - 1]
        reason = pieces[-1]["meta_info"]["finish_reason"]
        assert reason == {"type": "stop", "matched": stop}

    def test_asyncio(self, engine, expected):
        async def run():
            tasks = [
                asyncio.create_task(engine.async_generate(None, GREEDY, ids)) for ids in PROMPTS
            ]
            while (await engine.async_get_internal_state()).running_batch_size < 4:
                take_steps(engine)
                await asyncio.sleep(0)
            freed = await engine.async_sleep(2, True, refuse_requests=True)
            assert await engine.async_is_sleeping()
            with pytest.raises(EngineStateError, match="engine sleeps"):
                await engine.async_generate(None, GREEDY, [1, 2])
            taken = [await engine.async_wake_up([tag]) for tag in BOTH]
            assert not await engine.async_is_sleeping()
            with running():
                return freed, taken, await asyncio.gather(*tasks)

        freed, taken, outputs = asyncio.run(run())
        assert freed == sum(taken) > 0
        assert [out["output_ids"] for out in outputs] == expected


class TestPauses:
    def test_wait_while_asleep(self, engine, expected):
        calls = start_all(engine, PROMPTS)
        engine.sleep(preserve_state=True)
        with pytest.raises(EngineStateError, match=r"waited for 4 .* sleep keeps them from fin"):
            engine.pause_generation("wait")
        engine.continue_generation()
        engine.wake_up()
        assert tokens_of(results(calls)) == expected
        engine.sleep()
        engine.pause_generation("wait")  # nobody has started
        engine.wake_up()
        engine.continue_generation()


class TestOtherCommands:
    def test_flush_and_release(self, engine, expected):
        calls = start_all(engine, PROMPTS)
        engine.sleep(preserve_state=True)
        answer = engine.flush_cache()
        assert not answer.success
        assert "4 running request(s) hold KV pages" in answer.error_msg
        with pytest.raises(EngineStateError, match=r"4 running request\(s\) hold KV pages"):
            engine.release_kv_cache()
        engine.wake_up()
        assert tokens_of(results(calls)) == expected
        for forget in (engine.flush_cache, engine.release_kv_cache):
            engine.generate_requests(PROMPTS, SHORT)
            engine.sleep(preserve_state=True)
            assert engine.get_internal_state().cached_kv_tokens > 0
            answer = forget()
            assert answer == 0 or answer.success
            assert engine.get_internal_state().cached_kv_tokens == 0
            engine.wake_up()
            assert [o.num_cached_tokens for o in engine.generate_requests(PROMPTS, SHORT)] == [
                0
            ] * 4

    def test_sleep_after_release(self, engine, expected):
        """There are no pages to save, and none to give back."""
        for preserve_state in (True, False):
            engine.release_kv_cache()
            weights = engine.get_internal_state().memory.weights_bytes
            assert engine.sleep(preserve_state=preserve_state) == weights
            assert engine.wake_up() > weights
            assert tokens_of(engine.generate_requests(PROMPTS, LONG)) == expected


def host_arrays(engine):
    """Weak references to all memory that an engine sleeps with."""
    kept = inside.core(engine).sleep_manager._copies
    assert kept.weights
    assert kept.pages is not None
    assert kept.pages.chunks
    copies = [
        *kept.weights.values(),
        *(c for _, page in kept.pages.chunks for kv in page.layers for c in kv[:2]),
    ]
    return [weakref.ref(part) for copy in copies for part in copy.parts.values()]


class TestTheEnd:
    @pytest.mark.parametrize("is_dropped", [True, False])
    def test_callers_are_answered_and_copies_freed(self, is_dropped):
        base = device_bytes()
        engine = make_engine()
        calls = start_all(engine, PROMPTS)
        engine.sleep(preserve_state=True)
        copies = host_arrays(engine)
        assert all(ref() is not None for ref in copies)
        if is_dropped:
            thread = inside.thread(engine)
            # Callers hold the engine while they wait.
            assert engine.abort_request(abort_all=True) == 4
            results(calls)
            del calls, engine
            gc.collect()
            thread.join(LIMIT_S)
            assert not thread.is_alive()
        else:
            engine.shutdown()
            for call in calls:
                with pytest.raises(EngineShutdownError):
                    call.result(LIMIT_S)
            for refused in (engine.sleep, engine.wake_up):
                with pytest.raises(EngineShutdownError):
                    refused()
            assert not engine.is_sleeping()
        gc.collect()
        assert [ref for ref in copies if ref() is not None] == []
        assert device_bytes() <= base
