"""An engine without its threads: every interruption at a step that the test chooses."""

from __future__ import annotations

import functools

import pytest

from sgljax_engine import EngineStateError, RequestOutput, SamplingParams
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

OPTIONS = {
    "page_size": 4,
    "max_running_requests": 4,
    "batch_buckets": (4,),
    "decode_steps": 2,
    "token_buckets": (64,),
    "chunked_prefill_size": 64,
    "max_model_len": 64,
}
PROMPTS = random_prompts(3, 5, 20)
NUM_TOKENS = 12
PARAMS = SamplingParams(temperature=0, max_new_tokens=NUM_TOKENS)
NEW = spread_weights(seed=1)


@pytest.fixture(scope="module")
def shared():
    return SteppedEngine(**OPTIONS)


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
    assert [len(request.output_ids) for request in running] == [2, 2, 2]
    assert engine.finish() == NUM_TOKENS // 2 - 1
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
    num_ended = 0 if 2 * num_steps >= NUM_TOKENS else len(PROMPTS)
    abort = functools.partial(cmd.Abort, AbortReq(abort_all=True))
    assert engine.ask(abort).result(0) == num_ended
    engine.core.outputs.flush()
    assert tokens(futures) == [ids[: 2 * num_steps] for ids in expected]


def test_a_pause_that_waits_is_answered_by_the_last_step(engine, expected):
    futures = engine.add(PROMPTS, PARAMS)
    engine.step()
    waiting = pause(engine, "wait")
    late = engine.add(PROMPTS[:1], PARAMS)
    for _ in range(NUM_TOKENS // 2 - 1):
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
    num_old = {"wait": NUM_TOKENS if num_steps else 0}.get(mode, 2 * num_steps)
    num_new = 0 if mode == "abort" else NUM_TOKENS - num_old
    for future in futures:
        versions = future.result(0).token_weight_versions
        assert versions == [before] * num_old + [before + 1] * num_new
