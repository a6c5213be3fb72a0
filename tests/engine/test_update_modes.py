"""Weight updates while requests run: what each mode does to them, and which weights made what."""

from __future__ import annotations

import contextlib
import gc
import json
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from sgljax_engine import (
    EngineStateError,
    InvalidRequestError,
    SamplingParams,
    WeightLoadError,
    WeightsLostError,
    WeightSyncError,
)
from sgljax_engine.core import weights_worker
from sgljax_engine.weights import apply, plan
from tests import inside
from tests.engine.interrupts import (
    LONG,
    NUM_TOKENS,
    assert_idle,
    make_engine,
    results,
    settle,
    start_all,
    update_in_flight,
    wait_until,
)
from tests.engine.models import random_prompts, spread_weights
from tests.threads import LIMIT_S, running, start, wait_for

OLD, NEW = spread_weights(), spread_weights(seed=1)
PROMPTS = random_prompts(4, 5, 30, seed=2)
SHORT = SamplingParams(temperature=0, max_new_tokens=8)


@pytest.fixture(scope="module")
def shared():
    with make_engine() as engine:
        engine.warmup()
        yield engine


@pytest.fixture
def engine(shared):
    """Serves the old weights; must be left idle."""
    shared.update_weights(OLD)
    yield shared
    settle(shared)


@pytest.fixture(scope="module")
def reference():
    """The new weights from the start."""
    with make_engine(weights=NEW) as engine:
        yield engine


@pytest.fixture(scope="module")
def old_outputs(shared):
    shared.update_weights(OLD)
    return [out.output_ids for out in shared.generate_requests(PROMPTS, LONG)]


def continued(reference, prompt, output):
    """What the new weights alone make of a request from its last old token on, when greedy."""
    versions = output.token_weight_versions
    num_old = versions.count(versions[0])
    params = SamplingParams(temperature=0, max_new_tokens=NUM_TOKENS - num_old)
    (out,) = reference.generate_requests([[*prompt, *output.output_ids[:num_old]]], params)
    return output.output_ids[:num_old] + out.output_ids


def assert_one_switch(output, version):
    """Some tokens of the version before, then some of this one."""
    versions = output.token_weight_versions
    num_old = versions.count(version - 1)
    assert 0 < num_old < len(versions)
    assert versions == [version - 1] * num_old + [version] * (len(versions) - num_old)
    assert output.first_weight_version == version - 1
    assert output.weight_version == version
    meta = output.to_dict()["meta_info"]
    assert meta["token_weight_versions"] == versions
    assert (meta["first_weight_version"], meta["weight_version"]) == (version - 1, version)


class TestModes:
    def test_retract(self, engine, reference, old_outputs):
        calls = start_all(engine, PROMPTS)
        version = update_in_flight(engine, NEW, mode="retract")
        for prompt, old, out in zip(PROMPTS, old_outputs, results(calls), strict=True):
            assert_one_switch(out, version)
            assert out.num_retractions == 1
            assert out.output_ids == continued(reference, prompt, out)
            assert out.output_ids != old
            # All that comes after the switch is scored as the new weights score it.
            (scored,) = reference.score([[*prompt, *out.output_ids]])
            num_new = out.token_weight_versions.count(version)
            np.testing.assert_allclose(out.logprobs[-num_new:], scored[-num_new:], atol=1e-4)

    def test_in_place_goes_on_over_old_keys(self, engine, reference, old_outputs):
        calls = start_all(engine, PROMPTS)
        version = update_in_flight(engine, NEW, mode="in_place")
        # A later request with the same prompt finds nothing of theirs.
        late = engine.generate_requests([PROMPTS[0]], SHORT)[0]
        assert late.num_cached_tokens == 0
        assert late.token_weight_versions == [version] * 8
        assert late.output_ids == reference.generate_requests([PROMPTS[0]], SHORT)[0].output_ids
        outputs = results(calls)
        for old, out in zip(old_outputs, outputs, strict=True):
            assert_one_switch(out, version)
            assert out.num_retractions == 0
            num_old = out.token_weight_versions.count(version - 1)
            assert out.output_ids[:num_old] == old[:num_old]
        assert any(
            out.output_ids != continued(reference, prompt, out)
            for prompt, out in zip(PROMPTS, outputs, strict=True)
        ), "old keys and values must tell"
        # What they leave behind is not shared either.
        assert engine.generate_requests([PROMPTS[1]], SHORT)[0].num_cached_tokens == 0


class TestInPause:
    def test_a_pause_refuses_an_update_that_waits(self, engine, old_outputs):
        """Or whoever pauses and updates would wait for it in vain, behind it in the queue."""
        calls = start_all(engine, PROMPTS)
        update = start(lambda: engine.update_weights(NEW, mode="wait"))
        wait_for(lambda: bool(inside.core(engine).pauses._pending))
        engine.pause_generation("in_place")
        with pytest.raises(EngineStateError, match="keeps them from finishing"):
            update.result(LIMIT_S)
        engine.update_weights(OLD, mode="in_place")
        engine.continue_generation()
        assert [out.output_ids for out in results(calls)] == old_outputs


class TestFlushCache:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"mode": "now"}, r"mode must be one of .* got 'now'"),
            ({"flush_cache": 1}, "flush_cache must be True, False or None"),
            ({"donate": "yes"}, "donate must be True or False, got 'yes'"),
            ({"verify": None}, "verify must be True or False, got None"),
        ],
    )
    def test_bad_arguments(self, engine, arguments, message):
        with pytest.raises(InvalidRequestError, match=message):
            engine.update_weights(NEW, **arguments)


class TestVersion:
    def test_tokens_carry_the_version_that_is_asked_for(self, engine, reference):
        calls = start_all(engine, PROMPTS)
        before = engine.weight_version
        assert engine.update_weights(NEW, version=before + 5, mode="in_place") == before + 5
        for output in results(calls):
            assert set(output.token_weight_versions) == {before, before + 5}
            assert output.token_weight_versions == sorted(output.token_weight_versions)
        assert engine.update_weights(OLD) == before + 6

    def test_an_old_version_is_refused_before_its_source_is_read(self, engine, old_outputs):
        version, read = engine.weight_version, []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan, "source_spec", read.append)
            for late in (1, version):
                message = f"version must be above the serving version {version}, got {late}$"
                with pytest.raises(InvalidRequestError, match=message):
                    engine.update_weights(NEW, version=late)
        assert (read, engine.weight_version) == ([], version)
        assert [out.output_ids for out in engine.generate_requests(PROMPTS, LONG)] == old_outputs

    def test_a_version_that_was_overtaken_is_refused_at_the_swap(self, engine):
        """Both were asked for while the version before them served; the second came last."""
        calls = start_all(engine, PROMPTS[:1])
        version = engine.weight_version + 2
        first = start(lambda: engine.update_weights(NEW, version=version, mode="wait"))
        wait_for(lambda: bool(inside.core(engine).pauses._pending))
        second = start(lambda: engine.update_weights(OLD, version=version))
        assert first.result(LIMIT_S) == version
        with pytest.raises(InvalidRequestError, match=f"serving version {version}, got {version}$"):
            second.result(LIMIT_S)
        results(calls)
        assert engine.find_differing_weights(NEW) == []

    def test_the_serving_version_is_loaded_again_when_asked(self, engine):
        version = engine.weight_version
        checksums = engine.get_weights_checksum()
        inside.core(engine).runner.weights = {
            name: x * 2 for name, x in inside.core(engine).runner.weights.items()
        }
        assert engine.update_weights(OLD, version=version, reload=True, verify=True) == version
        assert engine.weight_version == version
        assert engine.get_weights_checksum() == checksums


class TestOrder:
    def test_updates_are_done_in_the_order_of_their_calls(self, engine):
        """The second must not overtake the first, which waits for a long request."""
        calls = start_all(engine, PROMPTS[:1])
        version = engine.weight_version
        first = start(lambda: engine.update_weights(NEW, mode="wait"))
        wait_for(lambda: bool(inside.core(engine).pauses._pending))
        second = start(lambda: engine.update_weights(OLD, mode="abort"))
        assert first.result(LIMIT_S) == version + 1
        assert second.result(LIMIT_S) == version + 2
        assert len(results(calls)[0].output_ids) == NUM_TOKENS

    def test_other_callers_are_served_while_weights_are_made(self, engine):
        """A source that is slow to read holds nobody up."""
        reading, go_on = threading.Event(), threading.Event()

        real = plan.source_spec

        def slow(source):
            reading.set()
            assert go_on.wait(LIMIT_S)
            return real(source)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan, "source_spec", slow)
            update = start(lambda: engine.update_weights(NEW))
            assert reading.wait(LIMIT_S)
            assert len(engine.generate_requests([[1, 2]], SHORT)[0].output_ids) == 8
            go_on.set()
            update.result(LIMIT_S)


STAGES = {
    "planning": ("sgljax_engine.weights.plan.plan_sync", {"layers": None}),
    "transform": ("sgljax_engine.weights.apply._make", {}),
    "swap": ("sgljax_engine.runner.runner.ModelRunner.swap_weights", {}),
}


class TestFailure:
    @pytest.mark.parametrize(
        ("stage", "mode"),
        [
            ("planning", "abort"),
            ("transform", "retract"),
            *(("swap", mode) for mode in ("in_place", "wait")),
        ],
    )
    def test_old_weights_go_on(self, engine, old_outputs, monkeypatch, stage, mode):
        """Nothing of a request is lost, whatever the stage: not even its pages."""
        calls = start_all(engine, PROMPTS)
        before = engine.get_internal_state()

        def fail(*_):
            raise RuntimeError(f"planted fault in {stage}")

        # Another structure than before, so that it is planned again.
        source = {name: jnp.asarray(w, jnp.bfloat16) for name, w in NEW.items()}
        with monkeypatch.context() as patch:
            patch.setattr(STAGES[stage][0], fail)
            waits = running() if mode == "wait" else contextlib.nullcontext()
            fault = pytest.raises((RuntimeError, WeightSyncError), match=f"fault in {stage}")
            with waits, fault:
                engine.update_weights(source, mode=mode)
        outputs = results(calls)
        assert [out.output_ids for out in outputs] == old_outputs
        assert {out.num_retractions for out in outputs} == {0}
        assert {v for out in outputs for v in out.token_weight_versions} == {before.weight_version}
        assert engine.weight_version == before.weight_version
        again = engine.generate_requests(PROMPTS, LONG)
        assert [out.output_ids for out in again] == old_outputs
        assert engine.update_weights(NEW) == before.weight_version + 1


def live_bytes():
    """Bytes of all arrays. Threads that are done with some may take a moment to let them go."""
    return sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted())


def settled_bytes(engine):
    """`live_bytes` once both threads of the engine are done with all earlier updates."""
    with contextlib.suppress(WeightSyncError):
        engine.update_weights({})  # refused; the updates thread lets go of one before the next
        raise AssertionError("it should be refused")
    engine.check_integrity()  # the engine's thread is behind them, too
    gc.collect()
    return live_bytes()


class TestMemory:
    """Without the garbage collector, which finds what a cycle keeps only at times of its own."""

    def test_refused_updates_leave_nothing(self, engine):
        calls = start_all(engine, PROMPTS)
        engine.pause_generation("in_place")
        source = {name: jnp.asarray(w) for name, w in NEW.items()}

        def refused(**how):
            with contextlib.suppress(EngineStateError, WeightSyncError):
                engine.update_weights(source, **how)
                raise AssertionError("it should be refused")

        refused(mode="in_place", flush_cache=True)
        before = settled_bytes(engine)
        gc.disable()
        try:
            for how in ({"mode": "in_place", "flush_cache": True}, {"mode": "wait"}) * 3:
                refused(**how)
            wait_until(engine, lambda _: live_bytes() == before)
        finally:
            gc.enable()
        engine.continue_generation()
        assert all(out.num_retractions == 0 for out in results(calls))


class TestDonation:
    def test_gives_the_same_weights(self, engine, reference):
        runner = inside.runner(engine)
        calls = start_all(engine, PROMPTS)
        old = dict(runner.weights)
        version = update_in_flight(engine, NEW, donate=True, verify=True)
        assert all(w.is_deleted() for w in old.values())
        for prompt, out in zip(PROMPTS, results(calls), strict=True):
            assert_one_switch(out, version)
            assert out.output_ids == continued(reference, prompt, out)
        assert engine.get_weights_checksum() == reference.get_weights_checksum()

    def test_takes_the_memory_of_one_model(self, engine, monkeypatch):
        """At no moment are there more weights than those of the model and one more."""
        sizes, real = [], apply._store_one
        largest = max(w.nbytes for w in inside.runner(engine).weights.values())
        source = {name: jnp.asarray(w) for name, w in NEW.items()}
        base = live_bytes()

        def watched(*args):
            made = real(*args)
            sizes.append(live_bytes() - base)
            return made

        monkeypatch.setattr(apply, "_store_one", watched)
        engine.update_weights(source, donate=True)
        assert len(sizes) == len(NEW)
        assert max(sizes) <= largest + 1  # and the flag of the newest

    def test_a_source_that_was_donated_elsewhere_is_refused(self, engine, old_outputs):
        source = {name: jnp.asarray(w) for name, w in NEW.items()}
        source["model.norm.weight"].delete()
        with pytest.raises(WeightSyncError, match=r"deleted, .*\['model.norm.weight'\]"):
            engine.update_weights(source, donate=True)
        again = engine.generate_requests(PROMPTS, LONG)
        assert [out.output_ids for out in again] == old_outputs

    def test_a_failure_half_way_is_said_and_healed(self, engine, reference, monkeypatch):
        calls = start_all(engine, PROMPTS)
        real, count = apply._store_one, []

        def fail_third(*args):
            count.append(args)
            if len(count) == 3:
                raise RuntimeError("planted fault")
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(apply, "_store_one", fail_third)
            with pytest.raises(WeightsLostError, match="failed half-way: planted fault"):
                update_in_flight(engine, NEW, donate=True)
        for call in calls:
            with pytest.raises(EngineStateError, match="planted fault"):
                call.result(LIMIT_S)
        for refused in (
            lambda: engine.generate_requests([[1, 2]], SHORT),
            lambda: engine.score([[1, 2]]),
            engine.warmup,
            engine.get_weights_checksum,
        ):
            with pytest.raises(EngineStateError, match="no weights until update_weights succeeds"):
                refused()
        assert_idle(engine)
        engine.update_weights(NEW, donate=True)
        out = engine.generate_requests([[1, 2]], SHORT)[0]
        assert out.output_ids == reference.generate_requests([[1, 2]], SHORT)[0].output_ids


class TestChecksums:
    def test_see_a_swap_of_two_values(self, engine):
        """One bit is in `test_negative_controls.py`."""
        name = "model.layers.0.mlp.up_proj.weight"
        before = engine.get_weights_checksum()
        swapped = dict(OLD)
        swapped[name] = OLD[name].copy()
        swapped[name][0, 0], swapped[name][3, 1] = OLD[name][3, 1], OLD[name][0, 0]
        engine.update_weights(swapped)
        now = engine.get_weights_checksum()
        assert {n for n in before if before[n] != now[n]} == {name}


def write_folder(folder, weights, **changes):
    """A Hugging Face folder of TINY."""
    folder.mkdir()
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    save_file(weights, folder / "model.safetensors")
    return folder


class TestFolder:
    def test_in_flight(self, engine, reference, tmp_path):
        folder = write_folder(tmp_path / "new", NEW)
        calls = start_all(engine, PROMPTS)
        version = update_in_flight(engine, str(folder), verify=True)
        for prompt, out in zip(PROMPTS, results(calls), strict=True):
            assert_one_switch(out, version)
            assert out.output_ids == continued(reference, prompt, out)
        assert engine.get_weights_checksum() == reference.get_weights_checksum()

    def test_of_another_model(self, engine, tmp_path, old_outputs):
        folder = write_folder(tmp_path / "other", NEW, rope_theta=1e4)
        with pytest.raises(WeightLoadError, match="holds another model: rope "):
            engine.update_weights(folder)
        again = engine.generate_requests(PROMPTS, LONG)
        assert [out.output_ids for out in again] == old_outputs


class TestWhereNewWeightsAreMade:
    """On one CPU between dispatches, since decoding has its cores; else on the updates' thread."""

    @pytest.fixture
    def made(self, monkeypatch):
        """Whether the updates' thread made each update, and what was computed by then."""
        found: list[tuple[bool, bool]] = []
        real = weights_worker.apply

        def note(plan, source, olds=None, *, verify=False):
            is_beside = threading.current_thread().name.endswith("-updates")
            arrays: list[Any] = [x for x in source.values() if isinstance(x, jax.Array)]
            found.append((is_beside, all(x.is_ready() for x in arrays)))
            return real(plan, source, olds, verify=verify)

        monkeypatch.setattr(weights_worker, "apply", note)
        return found

    def test_the_first_of_a_kind_compiles_beside_the_decode_loop(self, shared, made):
        on_device = jax.tree.map(jnp.asarray, NEW)
        for weights in (on_device, on_device, OLD, OLD, on_device):
            shared.update_weights(weights)
        shared.update_weights(on_device, verify=True)
        shared.update_weights(on_device, mode="wait")
        places = [is_beside for is_beside, _ in made]
        assert places == [True, False, True, True, True, True, True]

    def test_the_source_is_computed_first(self, shared, made):
        on_device = jax.tree.map(jnp.asarray, NEW)

        @jax.jit
        def slow(tree):
            x = jax.lax.fori_loop(0, 50, lambda _, x: x @ x * 0, jnp.zeros((500, 500)))
            return jax.tree.map(lambda leaf: leaf + x[0, 0], tree)

        shared.update_weights(slow(on_device))
        shared.update_weights(slow(on_device))
        assert made == [(True, True), (False, True)]
