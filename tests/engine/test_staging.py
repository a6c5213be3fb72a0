"""Weights that are staged beside the serving ones, then published or discarded."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest

from sgljax_engine import (
    EngineShutdownError,
    EngineStateError,
    InvalidRequestError,
    SamplingParams,
    StagedWeights,
    WeightLoadError,
    WeightSyncError,
)
from tests import inside
from tests.engine.interrupts import (
    device_bytes,
    make_engine,
    results,
    settle,
    start_all,
    wait_until,
)
from tests.engine.models import random_prompts, spread_weights
from tests.threads import LIMIT_S, held, running

OLD, NEW, THIRD = (spread_weights(seed=seed) for seed in range(3))
PROMPTS = random_prompts(3, 5, 30, seed=2)
SHORT = SamplingParams(temperature=0, max_new_tokens=6)
BOTH = ("weights", "kv_cache")


@pytest.fixture(scope="module")
def shared():
    with make_engine() as engine:
        engine.warmup()
        yield engine


@pytest.fixture
def engine(shared):
    """Serves the old weights; must be left awake and idle, with nothing staged."""
    shared.update_weights(OLD)
    gc.collect()
    before = device_bytes()
    yield shared
    assert not shared.is_sleeping()
    settle(shared)
    gc.collect()
    assert device_bytes() == before


@pytest.fixture(scope="module")
def expected(shared):
    """What each of the three weights says to the prompts."""
    outputs = []
    for weights in (OLD, NEW, THIRD):
        shared.update_weights(weights)
        outputs.append(tokens_of(shared))
    assert outputs[0] != outputs[1] != outputs[2]
    return outputs


def tokens_of(engine):
    return [out.output_ids for out in engine.generate_requests(PROMPTS, SHORT)]


# ------------------------------------------------------------------ publishing


def test_staged_weights_serve_only_once_they_are_published(engine, expected):
    version = engine.weight_version
    checksums = engine.get_weights_checksum()
    staged = engine.stage_weights(NEW, verify=True)
    assert (staged.state, staged.weight_version) == ("staged", None)
    assert staged.num_bytes == sum(weight.nbytes for weight in NEW.values())
    assert engine.get_weights_checksum() == checksums
    assert tokens_of(engine) == expected[0]
    assert engine.weight_version == version
    assert engine.publish_weights(staged) == engine.weight_version == version + 1
    assert (staged.state, staged.weight_version) == ("published", version + 1)
    assert tokens_of(engine) == expected[1]
    assert engine.find_differing_weights(NEW) == []


def test_the_source_may_change_once_weights_are_staged(engine, expected):
    source = {name: weight.copy() for name, weight in NEW.items()}
    staged = engine.stage_weights(source)
    for weight in source.values():
        weight.fill(np.nan)
    engine.publish_weights(staged)
    assert tokens_of(engine) == expected[1]


def test_publishing_again_changes_nothing(engine, expected):
    first, second = engine.stage_weights(NEW), engine.stage_weights(THIRD)
    version = engine.publish_weights(first)
    updates = engine.get_internal_state().counters.num_weight_updates
    assert engine.publish_weights(first) == version
    assert engine.publish_weights(second) == version + 1
    assert engine.publish_weights(first) == version  # a late retry takes nothing back
    assert engine.get_internal_state().counters.num_weight_updates == updates + 1
    assert tokens_of(engine) == expected[2]


def test_the_last_published_weights_serve_whenever_they_were_staged(engine, expected):
    staged = engine.stage_weights(NEW)
    version = engine.update_weights(THIRD)
    assert tokens_of(engine) == expected[2]
    assert engine.publish_weights(staged) == version + 1
    assert tokens_of(engine) == expected[1]


def test_what_publishing_refuses_stays_staged(engine, expected):
    staged = engine.stage_weights(NEW)
    calls = start_all(engine, PROMPTS)
    version = engine.weight_version
    with pytest.raises(EngineStateError, match="flush_cache=True with mode='in_place'"):
        engine.publish_weights(staged, mode="in_place", flush_cache=True)
    assert (staged.state, engine.weight_version) == ("staged", version)
    engine.abort_request(abort_all=True)
    results(calls)
    assert engine.publish_weights(staged) == version + 1
    assert tokens_of(engine) == expected[1]


def test_weights_are_published_as_the_version_that_is_asked_for(engine, expected):
    staged = engine.stage_weights(NEW)
    version = engine.weight_version + 10
    for late in (1, engine.weight_version):
        with pytest.raises(InvalidRequestError, match=f"above the serving version .* got {late}$"):
            engine.publish_weights(staged, version=late)
    assert (staged.state, tokens_of(engine)) == ("staged", expected[0])
    assert engine.publish_weights(staged, version=version) == version
    assert (staged.weight_version, engine.weight_version) == (version, version)
    (out,) = engine.generate_requests(PROMPTS[:1], SHORT)
    assert out.token_weight_versions == [version] * len(out.output_ids)
    for again in (None, version):
        assert engine.publish_weights(staged, version=again) == version
    with pytest.raises(InvalidRequestError, match=f"must be {version}, .* got {version + 1}$"):
        engine.publish_weights(staged, version=version + 1)
    assert engine.update_weights(OLD) == version + 1


# ------------------------------------------------------------------ discarding


def test_discarding_frees_the_memory(engine, expected):
    before = device_bytes()
    staged = engine.stage_weights(NEW)
    assert device_bytes() == before + staged.num_bytes
    assert engine.discard_weights(staged)
    assert device_bytes() == before
    assert staged.state == "discarded"
    assert not engine.discard_weights(staged)
    with pytest.raises(EngineStateError, match="were discarded"):
        engine.publish_weights(staged)
    assert tokens_of(engine) == expected[0]


def test_published_weights_cannot_be_discarded(engine, expected):
    staged = engine.stage_weights(NEW)
    before = device_bytes()
    engine.publish_weights(staged)
    assert device_bytes() == before - staged.num_bytes  # the old ones are gone
    assert not engine.discard_weights(staged)
    assert staged.state == "published"
    assert tokens_of(engine) == expected[1]


def test_forgotten_weights_are_freed(engine):
    before = device_bytes()
    staged = engine.stage_weights(NEW)
    del staged
    assert device_bytes() == before


# ------------------------------------------------------------------ failures


def test_a_failure_leaves_nothing_staged(engine, expected, tmp_path):
    before = device_bytes()
    broken = dict(NEW)
    name = next(iter(broken))
    del broken[name]
    with pytest.raises(WeightSyncError, match=f"parameter '{name}'.*missing"):
        engine.stage_weights(broken)
    with pytest.raises(WeightLoadError):
        engine.stage_weights(tmp_path)
    assert device_bytes() == before
    assert tokens_of(engine) == expected[0]


def test_bad_arguments(engine):
    with pytest.raises(InvalidRequestError, match="staged must be StagedWeights, got dict"):
        engine.publish_weights(NEW)
    with pytest.raises(InvalidRequestError, match="staged must be StagedWeights, got NoneType"):
        engine.discard_weights(None)
    with pytest.raises(InvalidRequestError, match="verify must be True or False, got 1"):
        engine.stage_weights(NEW, verify=1)
    staged = engine.stage_weights(NEW)
    with pytest.raises(InvalidRequestError, match=r"mode must be one of.*'drain'"):
        engine.publish_weights(staged, mode="drain")
    with pytest.raises(InvalidRequestError, match="flush_cache must be"):
        engine.publish_weights(staged, flush_cache=1)
    assert staged.state == "staged"


def test_other_engines_and_the_end():
    with make_engine() as one, make_engine() as other:
        staged = one.stage_weights(NEW)
        for call in (other.publish_weights, other.discard_weights):
            with pytest.raises(InvalidRequestError, match="this engine staged itself"):
                call(staged)
        before = device_bytes()
        one.shutdown()
        assert device_bytes() <= before - staged.num_bytes  # with what served
        assert staged.state == "discarded"
        assert not one.discard_weights(staged)
        for call in (lambda: one.publish_weights(staged), lambda: one.stage_weights(NEW)):
            with pytest.raises(EngineShutdownError):
                call()


def test_staged_weights_do_not_keep_an_engine_alive():
    engine = make_engine()
    staged = engine.stage_weights(NEW)
    thread = inside.thread(engine)
    del engine
    gc.collect()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert staged.state == "discarded"


# ------------------------------------------------------------------ sleep and pauses


@pytest.mark.parametrize("level", [1, 2])
def test_publishing_wakes_the_weights(engine, expected, level):
    staged = engine.stage_weights(NEW)
    engine.sleep(level)
    assert device_bytes() >= staged.num_bytes
    engine.publish_weights(staged)
    assert engine.get_internal_state().asleep == ("kv_cache",)
    engine.wake_up()
    assert tokens_of(engine) == expected[1]


def test_weights_are_staged_and_discarded_while_the_engine_sleeps(engine, expected):
    engine.sleep()
    staged = engine.stage_weights(NEW)
    assert engine.get_internal_state().asleep == BOTH
    assert engine.discard_weights(staged)
    engine.wake_up()
    assert tokens_of(engine) == expected[0]


# ------------------------------------------------------------------ asyncio


def test_asyncio(engine, expected):
    async def scenario() -> tuple[int, list[list[int]], StagedWeights]:
        dropped, staged = await asyncio.gather(
            engine.async_stage_weights(THIRD), engine.async_stage_weights(NEW)
        )
        version = await engine.async_publish_weights(staged)
        assert await engine.async_discard_weights(dropped)
        assert not await engine.async_discard_weights(staged)
        outputs = await engine.async_generate_requests(PROMPTS, SHORT)
        return version, [out.output_ids for out in outputs], staged

    with running():
        version, outputs, staged = asyncio.run(scenario())
    assert version == engine.weight_version == staged.weight_version
    assert outputs == expected[1]


def test_cancelled_tasks_leave_nothing_staged(engine, expected):
    before = device_bytes()

    async def scenario() -> None:
        with held(engine):
            task = asyncio.ensure_future(engine.async_stage_weights(NEW))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(scenario())
    engine.discard_weights(engine.stage_weights(NEW))  # done behind it
    gc.collect()
    assert device_bytes() == before
    wait_until(engine, lambda state: state.running_batch_size == 0)
    assert tokens_of(engine) == expected[0]
