"""One of two processes of a Tunix program; two_processes.py starts both.

    python -m tests.adapter.one_of_processes CASE RANK PORT

It tells on standard output, a line each, how far it is. Cases that end early do so when the test
writes a line to one of the processes.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import logging
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tunix.rl.grpo.grpo_learner import GRPOLearner
from tunix.rl.rl_cluster import RLCluster, Role

from sgljax_engine import InvalidConfigError, localize
from tests import inside
from tests import tunix_reference as ref
from tests.adapter import grpo_parts as parts
from tests.adapter.helpers import new_rollout, params_of, text_of
from tests.geometry import SMALL
from tunix_sgljax import SglJaxRollout

NUM_PROCESSES = 2
NUM_STEPS = 3
TIMEOUT_S, PATIENT_S = 10, 300
"""After which the other process counts as dead, or is no longer waited for."""


def tell(*words: Any) -> None:
    """Writes a line for the test."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def is_told_to_go() -> bool:
    """Whether the test lets this process go on; it waits for that, or for its end."""
    return bool(sys.stdin.readline())


def make_mesh(num_tensor_shards: int = 1) -> Mesh:
    """All devices of both processes."""
    return Mesh(np.array(jax.devices()).reshape(-1, num_tensor_shards), ("fsdp", "tp"))


def make_cluster() -> Any:
    """A Tunix cluster whose models are sharded over all devices; its engine is built."""
    mesh = make_mesh()
    made = parts.make_parts(
        meshes=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
        max_steps=NUM_STEPS,
        rollout_engine=functools.partial(SglJaxRollout, **SMALL),
        rollout_config=parts.rollout_config(seed=jax.process_index()),
    )
    for role in ("actor", "reference"):
        model = made.arguments[role]
        state = nnx.state(model)
        shardings = nnx.get_named_sharding(state, mesh)
        nnx.update(model, jax.tree.map(jax.device_put, jax.tree.map(np.asarray, state), shardings))
    cluster: Any = RLCluster(**made.arguments)
    assert cluster.rollout.mesh is mesh
    assert cluster.rollout.engine.weight_version == 0
    return cluster


def own_batches(rank: int) -> list[dict[str, Any]]:
    """This process's prompts of each step."""
    size = parts.PROMPTS_PER_STEP
    lengths = [2 + i % 4 for i in range(NUM_STEPS * NUM_PROCESSES * size)]
    prompts = [text_of(ids) for ids in ref.make_prompts(64, lengths, seed=7)]
    starts = range(rank * size, len(prompts), NUM_PROCESSES * size)
    return [{"prompts": np.array(prompts[at : at + size])} for at in starts]


def train(rank: int) -> None:
    """GRPO steps; tells the checksums of the engine's weights."""
    cluster = make_cluster()
    rollout, actor = cluster.rollout, cluster.actor_trainer.model
    assert any(not x.is_fully_addressable for x in jax.tree.leaves(params_of(actor)))
    tell("before", json.dumps(rollout.engine.get_weights_checksum()))
    # Tunix 0.1.7 gets log-probs of a reference wrong with several processes, without an error. And
    # the rows of a process must be a multiple of all devices along "fsdp".
    assert parts.PROMPTS_PER_STEP * parts.NUM_GENERATIONS % cluster.rollout.mesh.size == 0
    GRPOLearner(cluster, parts.grpo_config(beta=0.0), parts.reward).train(own_batches(rank))
    assert cluster.global_steps == rollout.weight_version == NUM_STEPS
    assert rollout.find_differing_weights(params_of(actor)) == []
    tell("after", json.dumps(rollout.engine.get_weights_checksum()))
    rollout.close()


def refuse(rank: int) -> None:
    """Meshes whose tensor axis spans the processes, and one whose does not."""
    del rank
    model = ref.make_tunix_qwen3("gqa2_tied")
    try:
        new_rollout(model, mesh=make_mesh(jax.device_count()))
    except InvalidConfigError as error:
        tell("refused", error)
    mesh = make_mesh(2)
    rollout = new_rollout(model, mesh=mesh)
    assert rollout.mesh is mesh
    weights = [
        core.runner.weights["model.layers.0.mlp.up_proj.weight"]
        for core in inside.cores(rollout.engine)
    ]
    assert set().union(*(w.devices() for w in weights)) == set(jax.local_devices())
    assert {w.addressable_shards[0].data.size * 2 for w in weights} == {weights[0].size}
    rollout.close()
    tell("accepted")


def gather(rank: int) -> None:
    """Arrays of all shardings, on a mesh of which one axis spans the processes."""
    del rank
    mesh, values = make_mesh(2), np.arange(64.0).reshape(8, 8)
    kept = {  # the sharding before and after
        "fsdp": (PartitionSpec("fsdp"), PartitionSpec(None)),
        "tp": (PartitionSpec(None, "tp"), PartitionSpec(None, "tp")),
        "both": (PartitionSpec("fsdp", "tp"), PartitionSpec(None, "tp")),
        "one_axis": (PartitionSpec(("fsdp", "tp")), PartitionSpec("tp")),
        "replicated": (PartitionSpec(), PartitionSpec()),
    }
    source: dict[str, Any] = {
        name: jax.device_put(values, NamedSharding(mesh, before))
        for name, (before, _) in kept.items()
    }
    source["host"] = jax.device_put(
        source["both"], source["both"].sharding.with_memory_kind("pinned_host")
    )
    kept["host"] = kept["both"]
    source |= {"local": jax.numpy.ones(3), "numpy": values}
    with jax.transfer_guard("disallow_explicit"):
        local = localize(source)
    assert local.keys() == source.keys()
    for name, (_, after) in kept.items():
        x = local[name]
        assert x.is_fully_addressable
        assert tuple(x.sharding.mesh.devices.flat) == tuple(jax.local_devices())
        assert x.sharding.mesh.axis_names == mesh.axis_names
        wanted = NamedSharding(x.sharding.mesh, after)
        assert x.sharding.is_equivalent_to(wanted, x.ndim), (name, x.sharding)
        np.testing.assert_array_equal(np.asarray(x), values)
    for name in ("local", "numpy"):
        assert local[name] is source[name]
    for name in ("tp", "replicated"):  # nothing to gather: the trainer's own memory
        pointers = {s.data.unsafe_buffer_pointer() for s in source[name].addressable_shards}
        assert pointers == {s.data.unsafe_buffer_pointer() for s in local[name].addressable_shards}
    tell("gathered")


def sample(rank: int) -> None:
    """Samples for ever, without a collective."""
    del rank
    rollout = make_cluster().rollout
    tell("ready")
    while is_told_to_go():
        while True:
            rollout.generate(parts.PROMPTS, parts.rollout_config())
            tell("busy")


def update(rank: int) -> None:
    """Updates the engine's weights, which needs the other process too."""
    del rank
    cluster = make_cluster()
    params = params_of(cluster.actor_trainer.model)
    cluster.rollout.update_params(params)
    tell("ready")
    if is_told_to_go():
        tell("busy")
        cluster.rollout.update_params(params)
        tell("updated")


def fail(rank: int) -> None:
    """Process 1 fails, while process 0 updates the engine's weights."""
    cluster = make_cluster()
    tell("ready")
    if rank == 1 and is_told_to_go():
        raise ValueError("a reward function failed")
    cluster.rollout.update_params(params_of(cluster.actor_trainer.model))
    tell("updated")


CASES: dict[str, Callable[[int], None]] = {
    case.__name__: case for case in (train, refuse, gather, sample, update, fail)
}


def main(case: str, rank: int, port: int) -> None:
    """Joins the other process and runs a case."""
    logging.set_verbosity(logging.ERROR)
    # Where nobody dies, a busy machine must not make it look so.
    timeout_s = TIMEOUT_S if CASES[case] in (sample, update, fail) else PATIENT_S
    jax.distributed.initialize(
        f"localhost:{port}",
        NUM_PROCESSES,
        rank,
        heartbeat_timeout_seconds=timeout_s,
        shutdown_timeout_seconds=timeout_s,
    )
    assert jax.process_count() == NUM_PROCESSES
    assert jax.device_count() == NUM_PROCESSES * jax.local_device_count() == 8
    CASES[case](rank)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
