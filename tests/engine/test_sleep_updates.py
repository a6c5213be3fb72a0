"""Weights that were given up, or come while an engine sleeps."""

from __future__ import annotations

import pytest

from sgljax_engine import (
    EngineStateError,
    SamplingParams,
    WeightsLostError,
    WeightSyncError,
)
from tests.engine.interrupts import (
    LONG,
    NUM_TOKENS,
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
from tests.threads import LIMIT_S, start

OLD, NEW = spread_weights(), spread_weights(seed=1)
PROMPTS = random_prompts(4, 5, 30, seed=2)
SHORT = SamplingParams(temperature=0, max_new_tokens=6)
BOTH = ("weights", "kv_cache")


@pytest.fixture(scope="module")
def shared():
    with make_engine() as engine:
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
def reference():
    """The new weights from the start."""
    with make_engine(weights=NEW) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(shared):
    """What the prompts give under the old weights when nobody interrupts."""
    shared.update_weights(OLD)
    return [out.output_ids for out in shared.generate_requests(PROMPTS, LONG)]


def assert_continued(reference, outputs, version):
    """Old tokens, then those that the new weights alone put behind them."""
    for prompt, out in zip(PROMPTS, outputs, strict=True):
        versions = out.token_weight_versions
        num_old = versions.count(version - 1)
        assert 0 < num_old < NUM_TOKENS
        assert versions == [version - 1] * num_old + [version] * (NUM_TOKENS - num_old)
        params = SamplingParams(temperature=0, max_new_tokens=NUM_TOKENS - num_old)
        (rest,) = reference.generate_requests([[*prompt, *out.output_ids[:num_old]]], params)
        assert out.output_ids[num_old:] == rest.output_ids


class TestLevel2:
    @pytest.mark.parametrize("order", [None, BOTH[::-1]])
    def test_nothing_is_generated_without_weights(self, engine, reference, order):
        calls = start_all(engine, PROMPTS)
        engine.sleep(level=2)
        assert engine.get_internal_state().host_bytes == 0
        late = start(lambda: engine.generate_requests([[7, 8]], SHORT)[0])
        wait_until(engine, lambda s: s.waiting_queue_size == 5)
        for tags in (None,) if order is None else ([tag] for tag in order):
            engine.wake_up(tags)
        state = engine.get_internal_state()
        assert not state.is_sleeping
        assert not state.has_weights
        for refused in (
            lambda: engine.generate_requests([[1, 2]], SHORT),
            lambda: engine.score([[1, 2]]),
            engine.warmup,
            engine.get_weights_checksum,
        ):
            with pytest.raises(EngineStateError, match=r"until update_weights .* sleep\(level=2\)"):
                refused()
        assert_stands_still(engine)
        assert engine.get_internal_state().waiting_queue_size == 5
        version = engine.update_weights(NEW)
        outputs = results(calls)
        assert_continued(reference, outputs, version)
        assert [out.num_retractions for out in outputs] == [1] * 4
        out = late.result(LIMIT_S)
        assert out.output_ids == reference.generate_requests([[7, 8]], SHORT)[0].output_ids
        assert set(out.token_weight_versions) == {version}

    def test_sleeping_again_without_weights_makes_none(self, engine):
        engine.sleep(level=2)
        engine.wake_up()
        engine.sleep(level=1)
        engine.wake_up()
        assert not engine.get_internal_state().has_weights
        with pytest.raises(EngineStateError, match="no weights until update_weights succeeds"):
            engine.generate_requests([[1, 2]], SHORT)
        engine.update_weights(OLD)

    def test_a_failing_update_after_it_changes_nothing(self, engine, reference, monkeypatch):
        calls = start_all(engine, PROMPTS)
        engine.sleep(level=2)
        engine.wake_up()
        with pytest.raises(WeightSyncError, match="missing"):
            engine.update_weights({"model.norm.weight": NEW["model.norm.weight"]})
        assert_stands_still(engine)
        version = engine.update_weights(NEW, donate=True, verify=True)
        assert_continued(reference, results(calls), version)


class TestUpdateAsleep:
    @pytest.mark.parametrize(
        ("level", "preserve_state", "donate", "mode"),
        [
            (1, True, True, "in_place"),
            (2, False, True, "retract"),
            (2, True, False, "in_place"),
        ],
    )
    def test_brings_the_weights_back(
        self, engine, reference, expected, level, preserve_state, donate, mode
    ):
        calls = start_all(engine, PROMPTS)
        freed = engine.sleep(level, preserve_state)
        kept, memory = engine.get_internal_state(), device_bytes()
        version = engine.update_weights(NEW, mode=mode, donate=donate)
        state = engine.get_internal_state()
        assert state.asleep == ("kv_cache",)
        assert state.has_weights
        assert state.weight_version == version
        weights = state.memory.weights_bytes
        wait_until(engine, lambda _: device_bytes() == memory + weights)
        had_weights = preserve_state or level == 1
        assert state.host_bytes == kept.host_bytes - weights * had_weights
        is_running = preserve_state and mode == "in_place"
        assert state.running_batch_size == 4 * is_running
        assert_stands_still(engine)
        assert engine.wake_up() + weights == freed
        outputs = results(calls)
        if not is_running:
            assert_continued(reference, outputs, version)
            return
        for old, out in zip(expected, outputs, strict=True):
            num_old = out.token_weight_versions.count(version - 1)
            assert 0 < num_old < NUM_TOKENS
            assert out.output_ids[:num_old] == old[:num_old]
            assert out.num_retractions == 0
        # What they leave behind, computed by both, is nobody else's.
        late = engine.generate_requests([PROMPTS[0]], SHORT)[0]
        assert late.num_cached_tokens == 0
        assert late.output_ids == reference.generate_requests([PROMPTS[0]], SHORT)[0].output_ids

    def test_new_weights_go_to_sleep_beside_a_kv_cache_that_sleeps(self, engine, reference, caplog):
        """As a trainer does that updates an engine while it needs the device itself."""
        freed, memory = engine.sleep(2), device_bytes()
        engine.update_weights(NEW)
        assert engine.get_internal_state().asleep == ("kv_cache",)
        assert engine.sleep() == engine.get_internal_state().memory.weights_bytes
        assert engine.get_internal_state().asleep == BOTH
        wait_until(engine, lambda _: device_bytes() == memory)
        assert engine.wake_up() == freed
        assert not caplog.records
        found = tokens_of(engine.generate_requests(PROMPTS, LONG))
        assert found == tokens_of(reference.generate_requests(PROMPTS, LONG))

    def test_wait_is_refused_when_requests_have_started(self, engine, expected):
        calls = start_all(engine, PROMPTS)
        engine.sleep(2, preserve_state=True)
        before = engine.get_internal_state()
        with pytest.raises(EngineStateError, match=r"waited for 4 .* sleep keeps them from fin"):
            engine.update_weights(NEW, mode="wait")
        after = engine.get_internal_state()
        assert (after.asleep, after.host_bytes) == (before.asleep, before.host_bytes)
        engine.wake_up()
        assert tokens_of(results(calls)) == expected

    @pytest.mark.parametrize(
        ("stage", "options"),
        [
            ("weights.plan.plan_sync", {}),
            ("weights.apply._make", {}),
            ("runner.runner.ModelRunner.swap_weights", {}),
            ("weights.apply._store_one", {"donate": True}),
        ],
    )
    def test_what_fails_keeps_what_is_kept(self, engine, expected, monkeypatch, stage, options):
        calls = start_all(engine, PROMPTS)
        engine.sleep(2, preserve_state=True)
        before, memory = engine.get_internal_state(), device_bytes()

        def fail(*_):
            raise RuntimeError("planted fault")

        # Another structure than before, so that it is planned again.
        source = {name: w.astype("float16") for name, w in NEW.items()}
        with monkeypatch.context() as patch:
            patch.setattr(f"sgljax_engine.{stage}", fail)
            with pytest.raises((RuntimeError, WeightSyncError), match="planted fault") as caught:
                engine.update_weights(source, **options)
        assert not isinstance(caught.value, WeightsLostError)
        after = engine.get_internal_state()
        assert (after.asleep, after.host_bytes) == (BOTH, before.host_bytes)
        assert after.weight_version == before.weight_version
        wait_until(engine, lambda _: device_bytes() == memory)
        engine.wake_up()
        assert tokens_of(results(calls)) == expected
