"""Sleep and wake: the devices' memory is lent away, and no request notices.

The file is long because one engine serves most of it; `test_sleep_faults` has what fails,
`test_sleep_updates` weights that were given up, or come meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from tests.compilation import recorded_programs
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
from tests.threads import LIMIT_S, first_piece, held, running, start, take_steps, wait_for

OLD, NEW = spread_weights(), spread_weights(seed=1)
PROMPTS = random_prompts(4, 5, 30, seed=2)
SHORT = SamplingParams(temperature=0, max_new_tokens=6)
GREEDY = {"temperature": 0, "max_new_tokens": NUM_TOKENS}
BOTH = ("weights", "kv_cache")
DEPTHS = [(1, False), (2, False), (1, True), (2, True)]


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


def begin(ask, is_started):
    """Asks on another thread; returns once the engine has taken that up."""
    future = start(ask)
    wait_for(lambda: is_started() or future.done())
    return future


class TestPreservedState:
    @pytest.mark.parametrize("level", [1, 2])
    def test_64_requests_go_on_where_they_were(self, crowd, poison, level):
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

        crowd.sleep(level, preserve_state=True)
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
    def test_pinned_memory(self, engine, expected, monkeypatch, poison, preserve_state):
        """As on accelerators; CPU devices have memory of that kind, too."""
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
    @pytest.mark.parametrize("preserve_state", [True, False])
    @pytest.mark.parametrize("order", [BOTH, BOTH[::-1]])
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
    @pytest.mark.parametrize(("level", "preserve_state"), [(1, True), (2, False)])
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

    @pytest.mark.parametrize("tags", [None, ["kv_cache"]])
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

    def test_cycles_compile_nothing(self, expected):
        """The state machine of interruptions forbids compiling, too."""
        with small_copies(), make_engine(forbid_compile=True) as engine:
            num_compiles = engine.warmup()
            with recorded_programs() as lowered:
                for cycle in range(4):
                    engine.flush_cache()
                    calls = start_all(engine, PROMPTS)
                    engine.sleep(1 + cycle // 2, preserve_state=cycle > 0)
                    engine.wake_up(["kv_cache"] if cycle % 2 else None)
                    engine.wake_up()
                    assert tokens_of(results(calls)) == expected
            assert not lowered
            assert engine.get_internal_state().num_compiles == num_compiles > 0


class TestSecondSleep:
    @pytest.mark.parametrize("tag", BOTH)
    @pytest.mark.parametrize("preserve_again", [True, False])
    def test_requests_go_on(self, engine, expected, tag, preserve_again):
        """What slept on keeps what it kept, whatever is asked for the rest."""
        calls = start_all(engine, PROMPTS)
        engine.sleep(preserve_state=True)
        engine.wake_up([tag])
        assert engine.sleep(preserve_state=preserve_again) > 0
        assert engine.get_internal_state().asleep == BOTH
        engine.check_integrity()
        engine.wake_up()
        outputs = results(calls)
        assert tokens_of(outputs) == expected
        # Only pages that were awake and not to be kept are prefilled again.
        is_retracted = tag == "kv_cache" and not preserve_again
        assert {out.num_retractions > 0 for out in outputs} == {is_retracted}


class TestNewRequests:
    @pytest.mark.parametrize(("level", "preserve_state"), DEPTHS)
    def test_are_refused_if_sleep_was_told_so(self, engine, expected, level, preserve_state):
        calls = start_all(engine, PROMPTS)
        engine.sleep(level, preserve_state, refuse_requests=True)

        def assert_refused(asleep):
            with pytest.raises(EngineStateError, match=rf"engine sleeps \({asleep}\); wake_up"):
                engine.generate_requests([[1, 2]], SHORT)
            with pytest.raises(EngineStateError, match="engine sleeps"):
                list(engine.generate(None, GREEDY, [1, 2], stream=True))
            with pytest.raises(EngineStateError, match="engine sleeps"):
                asyncio.run(engine.async_generate(None, {"n": 2}, [1, 2]))

        assert_refused(r"\['weights', 'kv_cache'\]")
        engine.update_weights(OLD, mode="in_place")
        assert_refused(r"\['kv_cache'\]")
        assert engine.get_internal_state().waiting_queue_size in (0, 4)
        engine.wake_up()
        late = engine.generate_requests([[1, 2]], SHORT)[0]
        assert len(late.output_ids) == 6
        assert tokens_of(results(calls)) == expected
        engine.sleep()  # the next one queues again
        call = start(lambda: engine.generate_requests([[1, 2]], SHORT)[0])
        wait_until(engine, lambda s: s.waiting_queue_size == 1)
        engine.wake_up()
        assert call.result(LIMIT_S).output_ids == late.output_ids

    def test_ids_are_not_taken_by_refused_ones(self, engine):
        engine.sleep(refuse_requests=True)
        with pytest.raises(EngineStateError, match="engine sleeps"):
            engine.generate(None, GREEDY, [1, 2], rid="a")
        engine.wake_up()
        assert engine.generate(None, GREEDY, [1, 2], rid="a")["meta_info"]["id"] == "a"


def outcome(out: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on sleep; log-probs roughly, since a prefill rounds otherwise."""
    meta = out["meta_info"]
    logprobs = [round(p, 3) for p, *_ in meta.get("output_token_logprobs", ())]
    prompt = [p for p, *_ in meta.get("input_token_logprobs", ())]
    facts = {"ids": out["output_ids"], "text": out["text"], "finish": meta["finish_reason"]}
    return facts | {"logprobs": logprobs, "prompt": prompt}


SEEDED = {"temperature": 1.0, "seed": 7, "max_new_tokens": 120}
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "seeded": (SEEDED, {}),
    "penalties": (SEEDED | PENALTIES, {}),
    "bias": (SEEDED | {"logit_bias": {5: 2.0}, "bad_token_ids": [9], "min_new_tokens": 9}, {}),
    "samples": (SEEDED | {"n": 3}, {}),
    "logprobs": (GREEDY, {"return_logprob": True, "logprob_start_len": 0}),
}


class TestWhatRequestsGet:
    @pytest.mark.parametrize("preserve_state", [True, False])
    @pytest.mark.parametrize("kind", KINDS)
    def test_is_the_same(self, engine, kind, preserve_state):
        params, options = KINDS[kind]
        ask = lambda: engine.generate(None, params, PROMPTS[1], **options)  # noqa: E731
        found = ask()
        whole = found if isinstance(found, list) else [found]
        engine.flush_cache()
        num = engine.get_internal_state().counters.num_first_tokens + len(whole)
        call = start(ask)
        wait_until(engine, lambda s: s.counters.num_first_tokens >= num)
        engine.sleep(preserve_state=preserve_state)
        state = engine.get_internal_state()
        assert state.running_batch_size + state.waiting_queue_size == len(whole)
        engine.wake_up()
        found = call.result(LIMIT_S)
        outs = found if isinstance(found, list) else [found]
        assert list(map(outcome, outs)) == list(map(outcome, whole))

    @pytest.mark.parametrize("preserve_state", [True, False])
    def test_a_stop_string_that_spans_sleep(self, engine, preserve_state):
        """Text goes on where it was: half of the stop string comes before, half after."""
        params = SEEDED | {"max_new_tokens": NUM_TOKENS}
        text = engine.generate(None, params, PROMPTS[1])["text"]
        stream = engine.generate(None, params, PROMPTS[1], stream=True)
        num_before = len(first_piece(stream)["text"])
        stream.close()
        stop = text[num_before - 1 : num_before + 3]
        assert text.index(stop) == num_before - 1
        stream = engine.generate(None, params | {"stop": [stop]}, PROMPTS[1], stream=True)
        pieces = [first_piece(stream)]
        engine.sleep(preserve_state=preserve_state)
        engine.wake_up()
        pieces.extend(start(lambda: list(stream)).result(LIMIT_S))
        assert "".join(piece["text"] for piece in pieces) == text[: num_before - 1]
        reason = pieces[-1]["meta_info"]["finish_reason"]
        assert reason == {"type": "stop", "matched": stop}

    @pytest.mark.parametrize("preserve_state", [True, False])
    def test_streams_have_no_token_missing_or_twice(self, engine, expected, preserve_state):
        stream = engine.generate(None, GREEDY, PROMPTS[0], stream=True)
        pieces = [first_piece(stream)]
        for level in (1, 1, 1):
            engine.sleep(level, preserve_state)
            asleep = engine.get_internal_state().counters.num_output_tokens
            rest = start(lambda: next(stream))
            engine.wake_up()
            pieces.append(rest.result(LIMIT_S))
            wait_until(engine, lambda s, n=asleep: s.counters.num_output_tokens > n)
        pieces.extend(start(lambda: list(stream)).result(LIMIT_S))
        assert [token for piece in pieces for token in piece["output_ids"]] == expected[0]
        assert [p["meta_info"]["finish_reason"] is None for p in pieces[:-1]] == [True] * (
            len(pieces) - 1
        )

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
    @pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
    @pytest.mark.parametrize(
        ("is_first", "continues_asleep", "preserve_state"),  # each pair of values meets
        [(True, True, True), (True, False, False), (False, True, False), (False, False, True)],
    )
    def test_both_hold(self, engine, expected, mode, is_first, continues_asleep, preserve_state):
        calls = start_all(engine, PROMPTS)
        if is_first:
            engine.pause_generation(mode)
        engine.sleep(preserve_state=preserve_state)
        if not is_first:
            engine.pause_generation(mode)
        state = engine.get_internal_state()
        assert (state.pause_mode, state.asleep) == (mode, BOTH)
        engine.check_integrity()
        ends = (engine.continue_generation, engine.wake_up)
        first, second = ends if continues_asleep else ends[::-1]
        first()
        assert_stands_still(engine)
        second()
        outputs = results(calls)
        if mode == "abort":
            for whole, out in zip(expected, outputs, strict=True):
                assert 0 < len(out.output_ids) < NUM_TOKENS
                assert out.output_ids == whole[: len(out.output_ids)]
            return
        assert tokens_of(outputs) == expected
        keeps_pages = preserve_state and mode == "in_place"
        assert {out.num_retractions for out in outputs} == {0 if keeps_pages else 1}

    @pytest.mark.parametrize("preserve_state", [True, False])
    def test_wait_is_answered_when_sleep_comes(self, engine, expected, preserve_state):
        calls = start_all(engine, PROMPTS)
        pause = begin(
            lambda: engine.pause_generation("wait"),
            lambda: inside.core(engine).pauses.mode == "wait",
        )
        engine.sleep(preserve_state=preserve_state)
        with pytest.raises(EngineStateError, match=r"waited for 4 .* sleep keeps them from fin"):
            pause.result(LIMIT_S)
        late = start(lambda: engine.generate_requests([[1, 2]], SHORT)[0])
        engine.wake_up()
        assert tokens_of(results(calls)) == expected
        wait_until(engine, lambda s: s.waiting_queue_size == 1)
        assert_stands_still(engine)
        assert not late.done()  # the pause goes on
        with running():
            engine.pause_generation("wait")
        engine.continue_generation()
        assert len(late.result(LIMIT_S).output_ids) == 6

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

    @pytest.mark.parametrize("preserve_state", [True, False])
    def test_an_update_that_waits_is_answered(self, engine, expected, preserve_state):
        calls = start_all(engine, PROMPTS)
        version = engine.weight_version
        update = begin(
            lambda: engine.update_weights(NEW, mode="wait"),
            lambda: bool(inside.core(engine).pauses._pending),
        )
        engine.sleep(preserve_state=preserve_state)
        with pytest.raises(EngineStateError, match=r"waited for 4 .* sleep keeps them from fin"):
            update.result(LIMIT_S)
        late = start(lambda: engine.generate_requests([PROMPTS[0]], LONG)[0])
        engine.wake_up()
        assert tokens_of(results([*calls, late])) == [*expected, expected[0]]
        assert engine.weight_version == version


class TestOtherCommands:
    @pytest.mark.parametrize("preserve_state", [True, False])
    def test_abort(self, engine, expected, preserve_state):
        rids = "abcd"
        num = engine.get_internal_state().counters.num_first_tokens + 4
        calls = [
            start(lambda ids=ids, rid=rid: engine.generate(None, GREEDY, ids, rid=rid))
            for ids, rid in zip(PROMPTS, rids, strict=True)
        ]
        wait_until(engine, lambda s: s.counters.num_first_tokens >= num)
        engine.sleep(preserve_state=preserve_state)
        assert engine.abort_request("b") == 1
        out = calls[1].result(LIMIT_S)
        assert out["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(out["output_ids"]) < NUM_TOKENS
        assert out["output_ids"] == expected[1][: len(out["output_ids"])]
        engine.check_integrity()
        engine.wake_up()
        rest = [calls[i].result(LIMIT_S)["output_ids"] for i in (0, 2, 3)]
        assert rest == [expected[i] for i in (0, 2, 3)]
        # What the aborted one had is cached, and it is right.
        again = engine.generate_requests([PROMPTS[1]], LONG)[0]
        assert (again.num_cached_tokens > 0) == preserve_state
        assert again.output_ids == expected[1]

    @pytest.mark.parametrize("preserve_state", [True, False])
    def test_abort_all(self, engine, expected, preserve_state):
        calls = start_all(engine, PROMPTS)
        engine.sleep(preserve_state=preserve_state)
        late = start(lambda: engine.generate_requests([[1, 2]], SHORT)[0])
        wait_until(engine, lambda s: s.running_batch_size + s.waiting_queue_size == 5)
        assert engine.abort_request(abort_all=True) == 5
        for out in results([*calls, late]):
            assert out.finish is not None
            assert out.finish.type == "abort"
        assert_idle(engine)
        engine.wake_up()
        assert tokens_of(engine.generate_requests(PROMPTS, LONG)) == expected

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

    def test_release_of_pages_that_are_awake(self, engine, expected):
        engine.generate_requests(PROMPTS, SHORT)
        freed = engine.sleep(preserve_state=True)
        pages = engine.wake_up(["kv_cache"])
        assert engine.release_kv_cache() == pages
        assert engine.wake_up() == freed - pages
        assert tokens_of(engine.generate_requests(PROMPTS, LONG)) == expected

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
        *(c for _, page in kept.pages.chunks for kv in page.layers for c in kv),
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

    def test_commands_that_wait_in_the_queue_are_answered(self):
        engine = make_engine()
        with held(engine):
            asked = [start(call) for call in (engine.sleep, engine.wake_up)]
            wait_for(lambda: inside.tasks(engine).qsize() == 2)
            inside.group(engine).request_stop()
        for future in asked:  # before the end or not at all
            with contextlib.suppress(EngineShutdownError):
                assert future.result(LIMIT_S) >= 0
        engine.shutdown()
