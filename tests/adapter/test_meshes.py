"""Several devices: a trainer on some and the rollout on others; weights that come from anywhere.

Runs in a process of its own with four host devices, since JAX fixes their number at start.
"""

from __future__ import annotations

import pytest

from tests.devices import run_python

GRPO = """
import functools
import numpy as np
from absl import logging
logging.set_verbosity(logging.ERROR)
import jax
from jax.sharding import Mesh
from tunix.rl.rl_cluster import RLCluster, Role
from sgljax_engine import InvalidConfigError
from tests import inside
from tests.adapter import grpo_parts as parts
from tests.adapter.test_replay import TRUNCATED, Run, grpo
from tests.geometry import SMALL
from tunix_sgljax import SglJaxRollout

devices = np.array(jax.devices())
assert len(devices) == 4
trainer = Mesh(devices[:2].reshape(2, 1), ("fsdp", "tp"))
sampler = Mesh(devices[2:].reshape(1, 2), ("fsdp", "tp"))
meshes = {Role.ACTOR: trainer, Role.REFERENCE: trainer, Role.ROLLOUT: sampler}
config = parts.rollout_config(tensor_parallel_size=2, **TRUNCATED)
run = Run(functools.partial(grpo, replay="support"), meshes=meshes, rollout_config=config)
cluster = run.cluster
assert cluster.rollout.mesh is sampler
run.learner.train(parts.list_batches())
parts.check_trained(cluster)
core = inside.core(cluster.rollout.engine)
weight = core.runner.weights["model.layers.0.mlp.up_proj.weight"]
assert weight.devices() == set(devices[2:])
assert weight.addressable_shards[0].data.size * 2 == weight.size
cluster.rollout.close()
assert run.reference_error() < 3e-5
ratios = run.log_ratios()
assert len(ratios) > 50
assert np.abs(ratios).mean() < 1e-4, np.abs(ratios).mean()

engine = functools.partial(SglJaxRollout, **SMALL)
made = parts.make_parts(meshes=meshes, rollout_engine=engine, rollout_config=config)
config.tensor_parallel_size = 4
try:
    RLCluster(**made.arguments)
except InvalidConfigError as error:
    assert "tp_size 4 must share out the 2 devices" in str(error)
else:
    raise AssertionError("tensor_parallel_size=4 on a mesh of 2")
print("meshes ok")
"""


DISJOINT = """
import functools
import numpy as np
from absl import logging
logging.set_verbosity(logging.ERROR)
import pytest
import tests.conftest
import jax
from jax._src.array import ArrayImpl
from jax.sharding import Mesh
from tunix.rl.grpo.grpo_learner import GRPOLearner
from tunix.rl.rl_cluster import RLCluster, Role
from tests import inside
from tests.adapter import grpo_parts as parts
from tests.adapter.helpers import params_of
from tests.geometry import SMALL
from tunix_sgljax import SglJaxRollout

fetched = []  # shapes of weights that came to the host, not of flags that say they are finite

def watched(function):
    @functools.wraps(function)
    def call(array, *args, **kwargs):
        if isinstance(array, jax.Array) and array.dtype != bool:
            fetched.append(array.shape)
        return function(array, *args, **kwargs)
    return call

class Watched(SglJaxRollout):
    num_syncs = 0

    def update_params(self, *args, **kwargs):
        fetched.clear()
        with pytest.MonkeyPatch.context() as patch:
            # NumPy reads a CPU's array through the buffer protocol, past `_value`.
            patch.setattr(ArrayImpl, "_value", property(watched(ArrayImpl._value.fget)))
            patch.setattr(np, "asarray", watched(np.asarray))
            patch.setattr(np, "array", watched(np.array))
            super().update_params(*args, **kwargs)
        assert not fetched, fetched
        Watched.num_syncs += 1

devices = np.array(jax.devices())
trainer = Mesh(devices[:2].reshape(2, 1), ("fsdp", "tp"))
others = Mesh(devices[2:].reshape(2, 1), ("fsdp", "tp"))
trained = []
for sampler in (trainer, others):
    meshes = {Role.ACTOR: trainer, Role.REFERENCE: trainer, Role.ROLLOUT: sampler}
    engine = functools.partial(Watched, **SMALL)
    made = parts.make_parts(
        meshes=meshes,
        max_steps=3,
        rollout_engine=engine,
        rollout_config=parts.rollout_config(seed=3),
    )
    first = jax.tree.map(np.asarray, params_of(made.model))
    cluster = RLCluster(**made.arguments)
    GRPOLearner(cluster, parts.grpo_config(), parts.reward).train(
        (parts.list_batches() + parts.list_batches())[:3]
    )
    assert cluster.global_steps == cluster.rollout.weight_version == 3
    weights = inside.cores(cluster.rollout.engine)[1].runner.weights
    assert {d for w in weights.values() for d in w.devices()} == {sampler.devices[1, 0]}
    trained.append(jax.tree.map(np.asarray, params_of(cluster.actor_trainer.model)))
    cluster.rollout.close()
assert Watched.num_syncs >= 6
assert not all(jax.tree.leaves(jax.tree.map(np.array_equal, first, trained[0])))
assert all(jax.tree.leaves(jax.tree.map(np.array_equal, *trained)))
print("meshes ok")
"""


WEIGHTS = """
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tests import tunix_reference as ref
from tests.adapter.helpers import named_params, new_rollout, tokens_of

devices = np.array(jax.devices())
assert len(devices) == 4
model = ref.make_tunix_qwen3("gqa2_tied")
params = named_params(model)

def sharded(order):
    mesh = Mesh(devices[order].reshape(-1, 1), ("fsdp", "tp"))
    return {
        name: jax.device_put(x, NamedSharding(mesh, P("fsdp" if x.shape[0] % 4 == 0 else None)))
        for name, x in params.items()
    }

sources = {
    "some of the devices and others": sharded([0, 1, 2, 3]),
    "pinned": {
        name: jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))
        for name, x in params.items()
    },
    "half on the host": {
        name: np.asarray(x) if i % 2 else x for i, (name, x) in enumerate(params.items())
    },
    "same devices in another order": sharded([2, 1]),
    "each on its own": {
        name: jax.device_put(x, devices[i % 4]) for i, (name, x) in enumerate(params.items())
    },
}
single = new_rollout(model)
expected = tokens_of(single, [[1, 2, 3]])
single.close()
rollout = new_rollout(model, mesh=Mesh(devices[1:3].reshape(1, 2), ("fsdp", "tp")))
zeros = {name: 0 * x for name, x in params.items()}
failed = []
for name, source in sources.items():
    rollout.update_params(zeros)
    try:
        rollout.update_params(source)
        assert tokens_of(rollout, [[1, 2, 3]]) == expected
    except Exception as error:
        failed.append(f"{name}: {error}")
rollout.close()
assert not failed, failed
print("meshes ok")
"""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(GRPO, id="grpo", marks=pytest.mark.slow),
        pytest.param(DISJOINT, id="disjoint", marks=pytest.mark.soak),
        pytest.param(WEIGHTS, id="weights", marks=pytest.mark.soak),
    ],
)
def test_four_devices(script):
    assert "meshes ok" in run_python("-c", script, num_devices=4).stdout
