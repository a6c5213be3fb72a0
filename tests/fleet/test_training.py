"""Trainings on a fleet beside trainings in process: the same samples make the same policies."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from tunix.rl.grpo.grpo_learner import GRPOLearner

from tests import lora_models
from tests.adapter.grpo_parts import (
    NUM_STEPS,
    check_trained,
    grpo_config,
    list_batches,
    make_parts,
    reward,
    rollout_config,
)
from tests.adapter.helpers import max_difference, params_of
from tests.fleet.parts import QUICK, Worker, workers
from tests.geometry import SMALL
from tunix_sgljax import (
    GrpoLearner,
    OverSampling,
    OverSamplingGrpoLearner,
    RLCluster,
    SglJaxFleetRollout,
    SglJaxRollout,
    create_sgljax_rollout,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SEED = 11
LORA = [{"module_path": ".*(attn|mlp).*", "rank": 4, "alpha": 8.0}]


def train(make_learner, engine: Any, *, actor: Any = None, sampling: Any = None) -> Any:
    """Trains, and returns the cluster; the caller closes its rollout."""
    config = rollout_config(seed=SEED, **(sampling or {}))
    parts = make_parts(rollout_engine=engine, rollout_config=config, max_steps=100)
    if actor is not None:
        parts.arguments["actor"] = actor(parts.arguments["reference"])
    cluster = RLCluster(**parts.arguments)
    make_learner(cluster).train(list_batches())
    return cluster


def in_process(**options: Any) -> Any:
    return functools.partial(SglJaxRollout, **SMALL, **options)


def on_fleet(store: Any, fleet: list[Worker], **options: Any) -> Any:
    settings = {"urls": [worker.url for worker in fleet], "weights_store": str(store), **QUICK}
    return functools.partial(SglJaxFleetRollout, fleet=settings, **options)


def check_same_policy(one: Any, other: Any) -> None:
    """Bit for bit, since nothing but the place of sampling differs."""
    first, second = (nnx.to_pure_dict(params_of(each.actor_trainer.model)) for each in (one, other))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.fixture
def close():
    """Closes rollouts of clusters at the end."""
    clusters: list[Any] = []
    yield clusters
    for cluster in clusters:
        cluster.rollout.close()


def plain(cluster):
    return GRPOLearner(cluster, grpo_config(num_iterations=2), reward)


def replaying(cluster):
    return GrpoLearner(cluster, reward, grpo_config(), replay="support")


KINDS = {
    "plain": (plain, {}),
    "replay": (replaying, {"top_k": 8, "top_p": 0.9}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_grpo(kind, tmp_path, close):
    learner, sampling = KINDS[kind]
    close.append(train(learner, in_process(), sampling=sampling))
    actor = close[0].actor_trainer.model
    with workers(actor, tmp_path, 2) as fleet:
        close.append(train(learner, on_fleet(tmp_path, fleet), sampling=sampling))
        check_same_policy(*close)
        rollout = close[1].rollout
        assert rollout.find_differing_weights(params_of(close[1].actor_trainer.model)) == []
        assert rollout.weight_version == 1 + close[0].rollout.weight_version


@pytest.mark.parametrize("lora", ["adapter", "merged"])
def test_lora_actors(lora, tmp_path, close):
    def actor(base):
        return lora_models.add_pairs(base, LORA)

    options = {"max_loras": 1, "max_lora_rank": 4} if lora == "adapter" else {}
    close.append(train(plain, in_process(lora=lora), actor=actor))
    model = close[0].actor_trainer.model
    with workers(model, tmp_path, 2, **options) as fleet:
        close.append(train(plain, on_fleet(tmp_path, fleet, lora=lora), actor=actor))
        params = [nnx.state(each.actor_trainer.model, nnx.LoRAParam) for each in close]
        if lora == "adapter":
            check_same_policy(*close)
        else:  # the host adds products in another order than the device
            assert max_difference(*(jax.tree.leaves(each) for each in params)) < 1e-4
        written = close[1].rollout.engine.last_written
        if lora == "adapter":
            assert written.num_bytes < written.whole_bytes


def test_over_sampling(tmp_path, close):
    """Groups that carry over, ends that the learner decides, pauses: through the same calls."""

    def learner(cluster):
        return OverSamplingGrpoLearner(
            cluster, grpo_config(beta=0.0), reward, over_sampling=OverSampling(factor=2.0)
        )

    parts = make_parts()
    with workers(parts.model, tmp_path, 2) as fleet:
        close.append(train(learner, on_fleet(tmp_path, fleet)))
        assert close[0].global_steps == NUM_STEPS


def test_a_trainer_that_is_resumed_finds_its_fleet(tmp_path, close):
    """Its versions go on, and the workers take them."""
    parts = make_parts()
    with workers(parts.model, tmp_path, 2) as fleet:
        first = train(plain, on_fleet(tmp_path, fleet))
        version = first.rollout.weight_version
        first.rollout.close()
        close.append(train(plain, on_fleet(tmp_path, fleet)))
        assert close[0].rollout.weight_version > version
        served = {worker.engine.weight_version for worker in fleet}
        assert served == {close[0].rollout.weight_version}


def test_the_factory(tmp_path, close):
    parts = make_parts(max_steps=2 * NUM_STEPS)
    with workers(parts.model, tmp_path, 1) as fleet:
        settings = {"urls": fleet[0].url, "weights_store": str(tmp_path), **QUICK}
        rollout = create_sgljax_rollout(parts.model, parts.arguments["tokenizer"], fleet=settings)
        cluster = RLCluster(**parts.arguments, rollout_worker=rollout)
        close.append(cluster)
        plain(cluster).train(list_batches())
        assert isinstance(cluster.rollout, SglJaxFleetRollout)
        check_trained(cluster, rollout.weight_version)
