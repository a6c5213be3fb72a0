"""Pausing generation; the specification's four cases are in server/test_seed_cases."""

from __future__ import annotations

import asyncio

import jax
import pytest

from sgljax_engine import EngineShutdownError, EngineStateError, InvalidRequestError, SamplingParams
from tests import inside
from tests.engine.interrupts import (
    LONG,
    NUM_TOKENS,
    assert_idle,
    assert_stands_still,
    make_engine,
    results,
    settle,
    start_all,
    tokens_of,
    wait_until,
)
from tests.engine.models import random_prompts
from tests.threads import LIMIT_S, first_piece, held, running, start, take_steps, wait_for

PROMPTS = random_prompts(4, 3, 20)
SHORT = SamplingParams(temperature=0, max_new_tokens=6)


@pytest.fixture(scope="module")
def shared():
    with make_engine() as engine:
        engine.warmup()
        yield engine


@pytest.fixture
def engine(shared):
    """Not paused, with every page free; and so it must be left."""
    shared.flush_cache()
    yield shared
    settle(shared)


@pytest.fixture(scope="module")
def expected(shared):
    """What the prompts give when nobody interrupts."""
    return [out.output_ids for out in shared.generate_requests(PROMPTS, LONG)]


class TestNewRequests:
    @pytest.mark.parametrize("mode", ["abort", "retract", "in_place", "wait"])
    def test_queue_and_start_after_continue(self, engine, mode):
        engine.pause_generation(mode=mode)
        call = start(lambda: engine.generate_requests([[1, 2, 3]], SHORT)[0])
        state = wait_until(engine, lambda s: s.waiting_queue_size == 1)
        assert state.running_batch_size == 0
        assert_stands_still(engine)
        assert not call.done()
        engine.continue_generation()
        assert len(call.result(LIMIT_S).output_ids) == 6

    def test_abort_while_paused_answers_at_once(self, engine):
        engine.pause_generation()
        one = start(lambda: engine.generate(None, {"max_new_tokens": 4}, [1, 2], rid="one"))
        two = start(lambda: engine.generate(None, {"max_new_tokens": 4}, [3, 4], rid="two"))
        wait_until(engine, lambda s: set(s.waiting_rids) == {"one", "two"})
        assert engine.abort_request("one") == 1
        reason = one.result(LIMIT_S)["meta_info"]["finish_reason"]
        assert reason == {"type": "abort", "message": "aborted by the caller"}
        assert not two.done()
        assert engine.abort_request(abort_all=True) == 1
        assert two.result(LIMIT_S)["output_ids"] == []
        assert two.result(LIMIT_S)["meta_info"]["weight_version"] is None


class TestWait:
    def test_lets_running_requests_finish_and_admits_none(self, engine, expected):
        calls = start_all(engine, PROMPTS)
        pause = start(lambda: engine.pause_generation(mode="wait"))
        wait_until(engine, lambda s: s.pause_mode == "wait")
        late = start(lambda: engine.generate_requests([[1, 2, 3]], SHORT)[0])
        pause.result(LIMIT_S)
        assert tokens_of(results(calls)) == expected
        state = wait_until(engine, lambda s: s.waiting_queue_size == 1)
        assert state.running_batch_size == 0
        assert_stands_still(engine)
        assert not late.done()
        engine.continue_generation()
        assert len(late.result(LIMIT_S).output_ids) == 6

    def test_lets_retracted_requests_finish(self, engine, expected):
        """Those that have started are finished, though they hold no pages when the pause comes."""
        calls = start_all(engine, PROMPTS)
        engine.pause_generation(mode="retract")
        with running():
            engine.pause_generation(mode="wait")
        assert tokens_of(results(calls)) == expected
        assert engine.get_internal_state().is_paused

    def test_continue_ends_it_with_an_error(self, engine, expected):
        calls = start_all(engine, PROMPTS)
        pause = start(lambda: engine.pause_generation(mode="wait"))
        wait_until(engine, lambda s: s.pause_mode == "wait")
        engine.continue_generation()
        with pytest.raises(EngineStateError, match="continue_generation ended the pause"):
            pause.result(LIMIT_S)
        assert tokens_of(results(calls)) == expected

    def test_another_pause_ends_it_with_an_error(self, engine, expected):
        calls = start_all(engine, PROMPTS)
        pause = start(lambda: engine.pause_generation(mode="wait"))
        wait_until(engine, lambda s: s.pause_mode == "wait")
        engine.pause_generation(mode="in_place")
        with pytest.raises(EngineStateError, match=r"waited for 4 .* keeps them from finishing"):
            pause.result(LIMIT_S)
        assert engine.get_internal_state().running_batch_size == 4
        engine.continue_generation()
        assert tokens_of(results(calls)) == expected


class TestLife:
    def test_is_idempotent(self, engine):
        engine.continue_generation()
        for mode in ("retract", "retract", "in_place", "abort", "wait"):
            engine.pause_generation(mode=mode)
            assert engine.get_internal_state().pause_mode == mode
        engine.continue_generation()
        engine.continue_generation()
        assert engine.get_internal_state().pause_mode is None

    def test_unknown_mode_names_the_known_ones(self, engine):
        with pytest.raises(InvalidRequestError, match=r"mode must be one of .*, got 'stop'"):
            engine.pause_generation(mode="stop")

    def test_shutdown_ends_a_pause(self):
        engine = make_engine()
        calls = start_all(engine, PROMPTS)
        pause = start(lambda: engine.pause_generation(mode="wait"))
        wait_until(engine, lambda s: s.pause_mode == "wait")
        engine.shutdown()
        with pytest.raises(EngineShutdownError):
            pause.result(LIMIT_S)
        for call in calls:
            with pytest.raises(EngineShutdownError):
                call.result(LIMIT_S)

    @pytest.mark.parametrize("place", ["prepare", "commit"])
    def test_a_fault_in_a_pause_is_answered(self, engine, monkeypatch, expected, place):
        """Then there is no pause, and requests go on."""
        calls = start_all(engine, PROMPTS)

        def fail(*_):
            raise RuntimeError("planted fault")

        with monkeypatch.context() as patch:
            if place == "commit":
                patch.setattr(inside.core(engine), "apply_pause_mode", fail)
            else:
                patch.setattr(inside.runner(engine).kv_memory, "wait", fail)
            with pytest.raises(RuntimeError, match="planted fault"):
                engine.pause_generation("retract")
        assert engine.get_internal_state().pause_mode is None
        assert tokens_of(results(calls)) == expected

    def test_a_warmup_that_fails_costs_running_requests_nothing(
        self, engine, monkeypatch, expected
    ):
        """Its programs take the pages; what ran over them is prefilled again."""
        calls = start_all(engine, PROMPTS)
        core = inside.core(engine)

        def fail(**_):
            for x in jax.tree.leaves(core.runner.kv_memory.kv):
                x.delete()
            raise RuntimeError("planted fault")

        with monkeypatch.context() as patch:
            patch.setattr(core.warmup, "compile_all", fail)
            with pytest.raises(RuntimeError, match="planted fault"):
                engine.warmup()
        assert tokens_of(results(calls)) == expected
        assert_idle(engine)

    def test_prefill_does_not_run_ahead_of_a_pause(self, engine, monkeypatch):
        """However long a prompt, at most one chunk of it is on the device between two steps."""
        core, ready = inside.core(engine), []
        real = core.step

        def step():
            real()
            ready.append(all(x.is_ready() for x in jax.tree.leaves(core.runner.kv_memory.kv)))

        with monkeypatch.context() as patch:
            patch.setattr(core, "step", step)
            engine.generate_requests(random_prompts(4, 240, 248), SHORT)
        assert len(ready) > 10
        assert all(ready)

    def test_shutdown_ends_a_pause_that_is_queued(self):
        engine = make_engine()
        calls = start_all(engine, PROMPTS)
        with held(engine):
            pause = start(lambda: engine.pause_generation(mode="wait"))
            wait_for(lambda: not inside.tasks(engine).empty())
            inside.group(engine).request_stop()
        with pytest.raises(EngineShutdownError):
            pause.result(LIMIT_S)
        for call in calls:
            with pytest.raises(EngineShutdownError):
                call.result(LIMIT_S)

    def test_streams_go_on_where_they_were(self, engine, expected):
        stream = engine.generate(
            None, {"temperature": 0, "max_new_tokens": NUM_TOKENS}, PROMPTS[0], stream=True
        )
        pieces = [first_piece(stream)]
        engine.pause_generation(mode="retract")
        engine.continue_generation()
        pieces.extend(start(lambda: list(stream)).result(LIMIT_S))
        assert [token for piece in pieces for token in piece["output_ids"]] == expected[0]

    def test_asyncio(self, engine, expected):
        async def run():
            tasks = [
                asyncio.create_task(
                    engine.async_generate(
                        None, {"temperature": 0, "max_new_tokens": NUM_TOKENS}, ids
                    )
                )
                for ids in PROMPTS
            ]
            while (await engine.async_get_internal_state()).running_batch_size < 4:
                take_steps(engine)
                await asyncio.sleep(0)
            await engine.async_pause_generation("retract")
            state = await engine.async_get_internal_state()
            flushed = await engine.async_flush_cache()
            await engine.async_continue_generation()
            with running():
                outputs = await asyncio.gather(*tasks)
            return state, flushed, await engine.async_abort_request("nobody"), outputs

        state, flushed, num_aborted, outputs = asyncio.run(run())
        assert state.waiting_queue_size == 4
        assert flushed.success
        assert num_aborted == 0
        assert [out["output_ids"] for out in outputs] == expected


class TestIds:
    """An id is one prompt's alone, or abort_request would find one and forget the other."""

    ONE, TWO = {"max_new_tokens": 4}, {"max_new_tokens": 4, "n": 2}

    @pytest.mark.parametrize(
        ("first", "second", "rid"),
        [(ONE, ONE, "a"), (TWO, ONE, "a"), (ONE, TWO, "a"), (TWO, TWO, "a"), (TWO, ONE, "a-1")],
    )
    def test_are_refused_while_in_use(self, engine, first, second, rid):
        engine.pause_generation()
        call = start(lambda: engine.generate(None, first, [1, 2], rid="a"))
        wait_until(engine, lambda s: s.waiting_queue_size == first.get("n", 1))
        with pytest.raises(InvalidRequestError, match=f"rid '{rid}' is the id of another"):
            engine.generate(None, second, [3], rid=rid)
        assert not call.done(), "the refused call must not end the other's requests"
        engine.continue_generation()
        call.result(LIMIT_S)
        engine.generate(None, second, [3], rid=rid)

    def test_of_a_prompt_name_all_its_samples(self, engine):
        engine.pause_generation()
        call = start(lambda: engine.generate(None, self.TWO, [1, 2], rid="a"))
        wait_until(engine, lambda s: s.waiting_rids == ("a-0", "a-1"))
        assert engine.abort_request("a-1") == 1
        assert engine.abort_request("a") == 1
        assert [out["meta_info"]["id"] for out in call.result(LIMIT_S)] == ["a-0", "a-1"]

    @pytest.mark.parametrize(
        ("rid", "message"),
        [
            (["a", "a"], "different ids"),
            (["a"], "one id for each of the 2 prompts, got 1"),
            (["a", 3], "must be a string, or a list"),
            (7, "must be a string, or a list"),
        ],
    )
    def test_bad_ones(self, engine, rid, message):
        with pytest.raises(InvalidRequestError, match=message):
            engine.generate(None, self.ONE, [[1], [2]], rid=rid)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({}, "give rid or abort_all=True"),
            ({"rid": "a", "abort_all": True}, "give rid or abort_all=True"),
            ({"rid": 3}, "rid must be a string, got 3"),
        ],
    )
    def test_bad_aborts(self, engine, arguments, message):
        with pytest.raises(InvalidRequestError, match=message):
            engine.abort_request(**arguments)
