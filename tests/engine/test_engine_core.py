"""An engine without its threads: every interruption at a step that the test chooses."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from sgljax_engine import EngineStateError, EngineStepError, RequestOutput, SamplingParams
from sgljax_engine.core import commands as cmd
from sgljax_engine.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
    PauseMode,
)
from tests.engine.models import random_prompts, spread_weights
from tests.engine.stepping import SteppedEngine
from tests.geometry import SMALL

PROMPTS = random_prompts(3, 5, 20)
PER_STEP = SMALL["decode_steps"]
NUM_TOKENS = 6 * PER_STEP
PARAMS = SamplingParams(temperature=0, max_new_tokens=NUM_TOKENS)
NEW = spread_weights(seed=1)


@pytest.fixture(scope="module")
def shared():
    return SteppedEngine(**SMALL)


@pytest.fixture
def engine(shared):
    """Idle and with its first weights; and so it must be left."""
    yield shared
    shared.finish()
    state = shared.core.state()
    assert state.running_batch_size == state.waiting_queue_size == 0
    assert state.available_kv_tokens == state.total_kv_tokens
    shared.core.check_integrity()
    shared.ask(functools.partial(cmd.FlushCache, FlushCacheReqInput())).result(0)
    if state.weight_version:
        shared.update(spread_weights()).result(0)


@pytest.fixture(scope="module")
def expected(shared):
    """Outputs that nobody interrupted."""
    futures = shared.add(PROMPTS, PARAMS)
    shared.finish()
    return [future.result(0).output_ids for future in futures]


def pause(engine: SteppedEngine, mode: PauseMode):
    return engine.ask(functools.partial(cmd.Pause, PauseGenerationReqInput(mode=mode)))


def resume(engine: SteppedEngine) -> None:
    engine.ask(functools.partial(cmd.Continue, ContinueGenerationReqInput())).result(0)


def tokens(futures) -> list[list[int]]:
    """Outputs that must be there already."""
    outputs: list[RequestOutput] = [future.result(0) for future in futures]
    return [out.output_ids for out in outputs]


def test_a_step_has_its_tokens(engine, expected):
    futures = engine.add(PROMPTS, PARAMS)
    assert engine.step() == 1
    running = engine.core.scheduler.running
    assert [len(request.output_ids) for request in running] == [PER_STEP] * 3
    assert engine.finish() == NUM_TOKENS // PER_STEP - 1
    assert tokens(futures) == expected


@pytest.mark.parametrize("mode", ["retract", "in_place"])
@pytest.mark.parametrize("num_steps", range(7))
def test_a_pause_between_any_two_steps_changes_no_token(engine, expected, mode, num_steps):
    futures = engine.add(PROMPTS, PARAMS)
    engine.step(num_steps)
    assert pause(engine, mode).result(0) is None
    assert engine.step() == 0
    resume(engine)
    engine.finish()
    assert tokens(futures) == expected


@pytest.mark.parametrize("num_steps", range(7))
def test_abort_gives_what_there_is(engine, expected, num_steps):
    futures = engine.add(PROMPTS, PARAMS)
    engine.step(num_steps)
    num_ended = 0 if PER_STEP * num_steps >= NUM_TOKENS else len(PROMPTS)
    abort = functools.partial(cmd.Abort, AbortReq(abort_all=True))
    assert engine.ask(abort).result(0) == num_ended
    engine.core.outputs.flush()
    assert tokens(futures) == [ids[: PER_STEP * num_steps] for ids in expected]


def test_a_pause_that_waits_is_answered_by_the_last_step(engine, expected):
    futures = engine.add(PROMPTS, PARAMS)
    engine.step()
    waiting = pause(engine, "wait")
    late = engine.add(PROMPTS[:1], PARAMS)
    for _ in range(NUM_TOKENS // PER_STEP - 1):
        assert not waiting.done()
        assert engine.step() == 1
    assert waiting.result(0) is None
    assert tokens(futures) == expected
    assert engine.step() == 0
    assert not late[0].done()
    resume(engine)
    engine.finish()
    assert tokens(late) == expected[:1]


def test_another_pause_refuses_one_that_waits(engine, expected):
    futures = engine.add(PROMPTS, PARAMS)
    engine.step()
    waiting = pause(engine, "wait")
    pause(engine, "retract").result(0)
    with pytest.raises(EngineStateError, match=r"waited for 3 .* keeps them from finishing"):
        waiting.result(0)
    resume(engine)
    engine.finish()
    assert tokens(futures) == expected


@pytest.mark.parametrize("mode", ["retract", "in_place", "wait", "abort"])
@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_each_token_has_the_version_of_its_step(engine, mode, num_steps):
    futures = engine.add(PROMPTS, PARAMS)
    engine.step(num_steps)
    before = engine.core.serving.version
    update = engine.update(NEW, mode=mode)
    assert update.done() == (mode != "wait" or num_steps == 0)
    engine.finish()
    assert update.result(0) == before + 1
    num_old = {"wait": NUM_TOKENS if num_steps else 0}.get(mode, PER_STEP * num_steps)
    num_new = 0 if mode == "abort" else NUM_TOKENS - num_old
    for future in futures:
        versions = future.result(0).token_weight_versions
        assert versions == [before] * num_old + [before + 1] * num_new


STEP_FAULTS = {
    "schedule": lambda core: (core.scheduler, "_admit"),
    "plan": lambda core: (core.pool, "open_window"),
    "counting": lambda core: (core.stats, "stepped"),
    "update": lambda core: (core.scheduler, "update"),
    "middle of an update": lambda core: (core.scheduler.pacer, "on_dispatch"),
    "publish": lambda core: (core.outputs, "publish"),
    "middle of publishing": lambda core: (core.stats, "finished"),
}


class TestFailures:
    """A failure of the host costs the requests of the step, or those that run, and nothing else."""

    @pytest.mark.parametrize("fault", STEP_FAULTS)
    @pytest.mark.parametrize("num_steps", [0, 1, NUM_TOKENS // PER_STEP - 1])
    def test_the_engine_lives(self, engine, expected, fault, num_steps):
        core = engine.core
        futures = engine.add(PROMPTS, PARAMS)
        engine.step(num_steps)
        is_finishing = fault == "middle of publishing"
        if is_finishing and num_steps < NUM_TOKENS // PER_STEP - 1:
            return  # nothing is finished yet
        owner, name = STEP_FAULTS[fault](core)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, _fail)
            assert engine.step() == 1
        core.check_integrity()
        late = engine.add(PROMPTS, PARAMS)
        engine.finish()
        errors = [future.exception(0) for future in futures]
        # Where nothing ran it is the first of those that wait.
        is_planned = fault not in ("schedule", "plan")
        num_failed = len(PROMPTS) if num_steps or is_planned else 1
        assert [type(error) for error in errors[:num_failed]] == [EngineStepError] * num_failed
        assert all("planted" in str(error) for error in errors[:num_failed])
        assert tokens(futures[num_failed:]) == expected[num_failed:]
        assert tokens(late) == expected
        assert not core.groups._groups
        assert not core.groups._names

    def test_those_that_a_step_did_not_touch_go_on(self, engine, expected, monkeypatch):
        """Two are running, and only one of them is part of the step that fails."""
        core = engine.core
        futures = engine.add(PROMPTS, PARAMS)
        engine.step()
        real = core.scheduler.schedule

        def schedule_one():
            plan = real()
            return dataclasses.replace(
                plan, decode=plan.decode[:1], step_limits=plan.step_limits[:1]
            )

        monkeypatch.setattr(core.scheduler, "schedule", schedule_one)
        monkeypatch.setattr(core.scheduler, "update", _fail)
        assert engine.step() == 1
        monkeypatch.undo()
        core.check_integrity()
        engine.finish()
        assert isinstance(futures[0].exception(0), EngineStepError)
        assert tokens(futures[1:]) == expected[1:]
        assert [future.result(0).num_retractions for future in futures[1:]] == [1, 1]

    def test_a_request_that_cannot_be_taken_in(self, engine, expected, monkeypatch):
        """It is refused, and neither the others of its call nor the engine suffer."""
        monkeypatch.setattr(engine.core.serving.adapters, "find", _fail)
        futures = engine.add(PROMPTS, PARAMS)
        assert all("planted" in str(future.exception(0)) for future in futures)
        monkeypatch.undo()
        futures = engine.add(PROMPTS, PARAMS)
        engine.finish()
        assert tokens(futures) == expected


def _fail(*_: object) -> None:
    raise RuntimeError("planted")
