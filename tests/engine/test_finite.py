"""Weights that hold NaN or infinity are refused, by name, wherever they come from."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sgljax_engine import (
    Engine,
    Rule,
    SamplingParams,
    WeightSyncError,
    hf_rules,
    logical_rules,
)
from sgljax_engine.weights.apply import apply
from sgljax_engine.weights.finite import is_finite, refuse_not_finite
from sgljax_engine.weights.forms import Form
from sgljax_engine.weights.plan import plan_sync
from sgljax_engine.weights.specs import TargetSpec, source_spec
from tests.engine.interrupts import make_engine, results, settle, start_all
from tests.engine.models import TINY, logical_weights, random_prompts, spread_weights
from tests.geometry import SMALL

GOLDEN = Path(__file__).parents[1] / "golden"
OLD, NEW = spread_weights(), spread_weights(seed=1)
PROJECTION = "model.layers.1.self_attn.k_proj.weight"
NAMES = ["model.embed_tokens.weight", PROJECTION, "model.layers.0.input_layernorm.weight"]
GREEDY = SamplingParams(temperature=0, max_new_tokens=8)
PROMPTS = random_prompts(3, 5, 30, seed=2)


def broken(weights, name=PROJECTION, value=np.nan):
    """The weights, one of which holds a value that is not finite at its end."""
    array = np.array(weights[name])
    array[(-1,) * array.ndim] = value
    return weights | {name: array}


def refused(name=PROJECTION):
    return pytest.raises(
        WeightSyncError, match=rf"^1 of 25 new weights hold NaN or infinity .*: '{name}'$"
    )


@pytest.fixture(scope="module")
def shared():
    with make_engine(weights=OLD) as engine:
        yield engine


@pytest.fixture
def engine(shared):
    """Serves the old weights, and must go on doing so."""
    shared.update_weights(OLD)
    before = shared.get_internal_state()
    expected = shared.generate_requests(PROMPTS, GREEDY)
    yield shared
    again = shared.generate_requests(PROMPTS, GREEDY)
    assert [out.output_ids for out in again] == [out.output_ids for out in expected]
    assert shared.weight_version == before.weight_version
    settle(shared)


class TestUpdate:
    @pytest.mark.parametrize(
        ("name", "value"), [*zip(NAMES, [np.nan, np.inf, -np.inf], strict=True)]
    )
    def test_host_arrays(self, engine, name, value):
        with refused(name):
            engine.update_weights(broken(NEW, name, value))

    @pytest.mark.parametrize("donate", [False, True])
    @pytest.mark.parametrize(
        ("name", "dtype"), [*zip(NAMES, ["float32", "bfloat16", "float16"], strict=True)]
    )
    def test_device_arrays_in_the_engines_orientation(self, engine, dtype, name, donate):
        """That of trainers: CPU kernels transpose what is float32, XLA the rest."""
        source = jax.tree.map(lambda x: jnp.asarray(x, dtype), broken(logical_weights(), name))
        for _ in range(2):  # made beside the decode loop, then between two dispatches
            with refused(name):
                engine.update_weights(source, logical_rules(TINY), donate=donate)

    def test_in_flight(self, engine):
        long = SamplingParams(temperature=0, max_new_tokens=60)
        calls = start_all(engine, PROMPTS, long)
        with refused():
            engine.update_weights(broken(NEW), mode="in_place")
        for out in results(calls):
            assert set(out.token_weight_versions) == {engine.weight_version}

    def test_what_a_hook_makes(self, engine):
        rules = [
            rule._replace(hook=jnp.log if rule.source == PROJECTION else None)
            for rule in hf_rules(TINY)
        ]
        for donate in (False, True):
            with refused():
                engine.update_weights(NEW, rules, donate=donate)

    def test_a_folder(self, engine, tmp_path):
        folder = write_golden(tmp_path / "broken", "model.norm.weight")
        with (
            Engine(GOLDEN / "qwen3_gqa_tied", dtype="float32", **SMALL) as other,
            pytest.raises(WeightSyncError, match=r"hold NaN or infinity .*: 'model.norm.weight'"),
        ):
            other.update_weights(folder)

    @pytest.mark.parametrize("donate", [False, True])
    def test_leaves_no_memory_behind(self, engine, donate):
        """Also for whoever keeps the error."""
        source = jax.tree.map(jnp.asarray, broken(NEW))
        with refused():  # the first of a kind makes what later ones use again
            engine.update_weights(source, donate=donate)
        before = settled_bytes(engine)
        with refused() as caught:
            engine.update_weights(source, donate=donate)
        assert settled_bytes(engine) == before
        assert caught.value.__traceback__ is not None

    def test_all_of_them(self, engine):
        weights = {name: np.full_like(array, np.nan) for name, array in NEW.items()}
        with pytest.raises(WeightSyncError, match=r"^25 of 25 .* and 17 more$"):
            engine.update_weights(weights)


class TestSwitchedOff:
    @pytest.mark.parametrize("donate", [False, True])
    def test_for_an_update(self, shared, donate):
        version = shared.weight_version
        assert shared.update_weights(broken(NEW), check_finite=False, donate=donate) == version + 1
        shared.update_weights(OLD)

    def test_for_an_engine(self):
        weights = broken(OLD)
        with make_engine(weights=weights, check_finite=False) as engine:
            assert engine.update_weights(weights) == 1
            with refused():
                engine.update_weights(weights, check_finite=True)


class TestStart:
    def test_arrays(self):
        with refused("lm_head.weight"):
            make_engine(weights=broken(OLD, "lm_head.weight"))

    def test_a_folder(self, tmp_path):
        folder = write_golden(tmp_path / "broken", PROJECTION)
        with pytest.raises(WeightSyncError, match=f"hold NaN or infinity .*: '{PROJECTION}'"):
            Engine(folder, dtype="float32", **SMALL)


def settled_bytes(engine):
    """Bytes of live arrays, once the engine's threads are done with all updates."""
    with pytest.raises(WeightSyncError, match="is missing"):
        engine.update_weights({})
    engine.check_integrity()
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted())


def write_golden(folder: Path, name: str) -> Path:
    shutil.copytree(GOLDEN / "qwen3_gqa_tied", folder)
    path = folder / "model.safetensors"
    save_file(broken(load_file(path), name, np.inf), path)
    return folder


class TestPlan:
    """What is stored counts, not what it was made of."""

    def plan(self, source, dtype, *, form=Form.LOGICAL, check_finite=True):
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = TargetSpec((2, 3), jnp.dtype(dtype), form, sharding, "")
        return plan_sync(source_spec(source), [Rule("w", "w")], {"w": target}, check_finite)

    @pytest.mark.parametrize("form", Form)
    def test_too_large_for_the_dtype(self, form):
        source = {"w": jnp.full((2, 3), 1e5)}
        old = {"w": jnp.zeros((2, 3))}
        plan = self.plan(source, "float16", form=form)
        with pytest.raises(WeightSyncError, match=r"1 of 1 .*: 'w'"):
            apply(plan, source)
        with pytest.raises(WeightSyncError, match=r"1 of 1 .*: 'w'"):
            apply(plan, source, [old])
        assert not old["w"].is_deleted()
        plan = self.plan(source, "bfloat16", form=form)
        assert np.isfinite(apply(plan, source)["w"].astype(np.float32)).all()

    def test_not_asked_for(self):
        source = {"w": jnp.full((2, 3), jnp.nan)}
        plan = self.plan(source, "float32", check_finite=False)
        assert np.isnan(apply(plan, source)["w"]).all()
        assert np.isnan(apply(plan, source, [{}])["w"]).all()

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_flags(self, dtype):
        largest = jnp.finfo(dtype).max
        x = jnp.array([[0.0, largest], [-largest, 1.0]], dtype)
        assert is_finite(x)
        assert is_finite(x[:0])
        run = jax.jit(is_finite)
        x = jnp.full((33, 77), largest)
        assert run(x)
        for value in (jnp.nan, jnp.inf, -jnp.inf):
            for place in ((0, 0), (16, 40), (32, 76)):
                assert not run(x.at[place].set(value))

    def test_names(self):
        refuse_not_finite(["a", "b"], [True, True])
        refuse_not_finite(["a", "b"], None)
        with pytest.raises(WeightSyncError, match=r"^2 of 3 .*: 'a', 'c'$"):
            refuse_not_finite(["a", "b", "c"], jnp.array([False, True, False]))
