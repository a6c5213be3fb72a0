"""What becomes of requests, pauses, updates and everything else while an engine sleeps."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from typing import Any

import pytest

from sgljax_engine import (
    EngineShutdownError,
    EngineStateError,
    SamplingParams,
)
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
    start_all,
    tokens_of,
    wait_until,
)
from tests.engine.models import random_prompts, spread_weights
from tests.engine.small_tokenizers import CharTokenizer
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


@pytest.fixture(scope="module")
def shared():
    with make_engine(tokenizer=Chars()) as engine:
        engine.warmup()
        yield engine


@pytest.fixture
def engine(shared):
    """Serves the old weights; must be left awake and idle."""
    shared.update_weights(OLD)
    yield shared
    assert not shared.is_sleeping()
    settle(shared)


@pytest.fixture(scope="module")
def expected(shared):
    """What the prompts give under the old weights when nobody interrupts."""
    shared.update_weights(OLD)
    return [out.output_ids for out in shared.generate_requests(PROMPTS, LONG)]


def begin(ask, is_started):
    """Asks on another thread; returns once the engine has taken that up."""
    future = start(ask)
    wait_for(lambda: is_started() or future.done())
    return future


class TestNewRequests:
    def test_wait_and_go_on(self, engine):
        engine.sleep()
        call = start(lambda: engine.generate_requests([[1, 2, 3]], SHORT)[0])
        wait_until(engine, lambda s: s.waiting_queue_size == 1)
        assert_stands_still(engine)
        assert not call.done()
        engine.wake_up()
        assert len(call.result(LIMIT_S).output_ids) == 6

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
    @pytest.mark.parametrize("preserve_state", [True, False])
    @pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
    @pytest.mark.parametrize("is_first", [True, False])
    @pytest.mark.parametrize("continues_asleep", [True, False])
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
