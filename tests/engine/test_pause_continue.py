"""Pausing generation; the specification's four cases are in server/test_seed_cases."""

from __future__ import annotations

import jax
import pytest

from sgljax_engine import EngineStateError, InvalidRequestError, SamplingParams
from tests import inside
from tests.engine.interrupts import (
    LONG,
    NUM_TOKENS,
    make_engine,
    results,
    settle,
    start_all,
    tokens_of,
    wait_until,
)
from tests.engine.models import random_prompts
from tests.threads import LIMIT_S, first_piece, running, start

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


class TestWait:
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


class TestLife:
    def test_is_idempotent(self, engine):
        engine.continue_generation()
        for mode in ("retract", "retract", "in_place", "abort", "wait"):
            engine.pause_generation(mode=mode)
            assert engine.get_internal_state().pause_mode == mode
        engine.continue_generation()
        engine.continue_generation()
        assert engine.get_internal_state().pause_mode is None

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

    def test_streams_go_on_where_they_were(self, engine, expected):
        stream = engine.generate(
            None, {"temperature": 0, "max_new_tokens": NUM_TOKENS}, PROMPTS[0], stream=True
        )
        pieces = [first_piece(stream)]
        engine.pause_generation(mode="retract")
        engine.continue_generation()
        pieces.extend(start(lambda: list(stream)).result(LIMIT_S))
        assert [token for piece in pieces for token in piece["output_ids"]] == expected[0]


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
