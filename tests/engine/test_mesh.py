"""Several devices: tensor parallelism, and weights that come from elsewhere.

Runs in a process of its own with eight host devices, since JAX fixes their number at start.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.devices import run_python

GOLDEN = Path(__file__).parents[1] / "golden" / "llama_bias_untied"

SETUP = """
import dataclasses
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from sgljax_engine import Engine, InvalidConfigError, SamplingParams
from sgljax_engine import WeightsLostError, WeightSyncError
from sgljax_engine.runner.kv import saved_pages
from tests import inside
from tests.engine.models import TINY, random_prompts, spread_weights
from tests.engine.interrupts import LONG as long, results, start_all, update_in_flight
from tests.geometry import SMALL

GOLDEN = sys.argv[1]
devices = np.asarray(jax.devices())
assert len(devices) == 8
prompts = random_prompts(9, 1, 40)
ONE = dataclasses.replace(TINY, num_layers=1)  # compiled in half the time
params = SamplingParams(temperature=0, max_new_tokens=20)

def outputs(engine):
    return [o.output_ids for o in engine.generate_requests(prompts, params)]

def shardings(engine):
    core = inside.runner(engine)
    return jax.tree.map(lambda x: x.sharding, (core.weights, core.kv_memory.kv))

def sleep_and_wake(engine, memory):
    # With requests in flight, which must not notice; in chunks of a few pages.
    whole = [o.output_ids for o in engine.generate_requests(prompts[:4], long)]
    core = inside.runner(engine)
    core._host_memory = core.kv_memory._host_memory = memory
    before = shardings(engine)
    calls = start_all(engine, prompts[:4], long)
    freed = engine.sleep(2, preserve_state=True)
    kept = inside.core(engine).sleep_manager._copies
    assert len(kept.pages.chunks) > 1
    if memory == "numpy":  # a replicated array is kept once
        assert {len(c.parts) for c in kept.weights.values()} <= {1, 2}
        assert engine.get_internal_state().host_bytes < freed
    del kept
    assert engine.wake_up(["kv_cache"]) + engine.wake_up(["weights"]) == freed
    assert shardings(engine) == before
    for o, ids in zip(results(calls), whole):
        assert o.output_ids == ids, "after sleep"
        assert o.num_retractions == 0
    engine.sleep()
    engine.wake_up()
    assert shardings(engine) == before

saved_pages._CHUNK_BYTES = 8192
mesh = Mesh(devices[:2].reshape(1, 2), ("fsdp", "tp"))
"""

SERVES = """
with Engine(model_config=ONE, weights=spread_weights(ONE), **SMALL) as single:
    expected = outputs(single)
    scored = single.score(prompts[:3])

    # Data ranks are engines of their own: group_cases has those.
    trainer = Mesh(devices[:2], ("fsdp",))
    # The trainer's arrays: sharded over the same devices, or on another part of them.
    sharded = {
        name: jax.device_put(
            w, NamedSharding(trainer, P("fsdp" if w.shape[0] % 8 == 0 else None))
        )
        for name, w in spread_weights(ONE).items()
    }
    with Engine(model_config=ONE, weights=sharded, mesh=mesh, **SMALL) as engine:
        assert outputs(engine) == expected
        for a, b in zip(engine.score(prompts[:3]), scored):
            np.testing.assert_allclose(a, b, atol=1e-4)
        layer = inside.runner(engine).kv_memory.kv.layers[0].k
        assert layer.sharding.device_set == set(devices[:2])
        assert layer.addressable_shards[0].data.shape[1] == ONE.num_kv_heads // 2
        elsewhere = jax.device_put(spread_weights(ONE, seed=1), devices[3])
        engine.update_weights(elsewhere)
        assert outputs(engine) != expected
        checksums = engine.get_weights_checksum()
        calls = start_all(engine, prompts[:2], long)
        version = update_in_flight(engine, sharded, mode="in_place", verify=True)
        for call in calls:
            assert set(call.result(600).token_weight_versions) == {version - 1, version}
        assert outputs(engine) == expected
        assert engine.get_weights_checksum() == single.get_weights_checksum() != checksums
        engine.update_weights(elsewhere, donate=True, verify=True)
        assert engine.get_weights_checksum() == checksums
        engine.update_weights(sharded, donate=True, verify=True)
        # One value that is not finite, on one device, of weights here and elsewhere.
        for source in (sharded, elsewhere):
            for name in ("model.norm.weight", "model.layers.0.mlp.down_proj.weight"):
                weight = source[name].at[(-1,) * source[name].ndim].set(np.nan)
                bad = source | {name: jax.device_put(weight, source[name].sharding)}
                for donate in (False, True):
                    try:
                        engine.update_weights(bad, donate=donate)
                    except WeightSyncError as error:
                        assert str(error).endswith(f": {name!r}"), error
                        assert not isinstance(error, WeightsLostError)
                    else:
                        raise AssertionError("NaN was taken")
        assert outputs(engine) == expected
        for memory in ("numpy", "pinned_host"):
            sleep_and_wake(engine, memory)
            assert engine.get_weights_checksum() == single.get_weights_checksum()
            assert outputs(engine) == expected

try:
    Engine(model_config=ONE, mesh=Mesh(devices.reshape(1, 8), ("fsdp", "tp")))
except InvalidConfigError as error:
    assert "num_heads must be a multiple of the size of the tensor axis (8), got 4" in str(error)
else:
    raise AssertionError("4 heads cannot be spread over 8 devices")
"""

BIASES = """
# Biases: as transformers computes them.
golden = np.load(f"{GOLDEN}/golden.npz")
with Engine(GOLDEN, mesh=mesh, dtype="float32", **SMALL) as engine:
    rows = range(int(golden["num_prompts"]))
    given = [golden[f"prompt_{i}"].tolist() for i in rows]
    greedy = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
    for i, output in enumerate(engine.generate_requests(given, greedy)):
        assert output.output_ids == golden[f"greedy_{i}"].tolist()[:24], i

"""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(SERVES, id="serves", marks=pytest.mark.slow),
        pytest.param(BIASES, id="biases", marks=pytest.mark.soak),
    ],
)
def test_eight_devices(script):
    done = run_python("-c", SETUP + script + "print('mesh ok')", GOLDEN, num_devices=8)
    assert "mesh ok" in done.stdout
