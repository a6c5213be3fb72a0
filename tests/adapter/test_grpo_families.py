"""GRPO by Tunix's own learner on the newest kinds of models: experts, and Gemma 4."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import optax
import pytest
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role

from tests import tunix_families as families
from tests import tunix_reference as ref
from tests.adapter.grpo_parts import EOS, one_device_mesh, rollout_config
from tests.adapter.helpers import EndingTokenizer, text_of
from tests.geometry import SMALL
from tunix_sgljax import SglJaxRollout, mismatch_report

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

NUM_STEPS, BATCH, NUM_GENERATIONS = 20, 4, 8
PROMPTS = [text_of(ids) for ids in ref.make_prompts(96, (3, 5, 2, 4), seed=7)]


@pytest.mark.soak
@pytest.mark.parametrize("name", ["gemma4_moe", "gemma4_shared_keys", "qwen3_moe"])
def test_twenty_steps(name):
    """The reward rises, every step's weights arrive, and the rollout is the trainer's model."""
    rewards: list[float] = []

    def reward(prompts, completions, **_):
        """The share of even tokens."""
        rows = [[int(word) for word in text.split()] for text in completions]
        found = [sum(token % 2 == 0 for token in row) / (len(row) or 1) for row in rows]
        rewards.append(float(np.mean(found)))
        return found

    model = families.make(name)
    mesh = one_device_mesh()
    fields: dict[str, Any] = {"rollout_engine": functools.partial(SglJaxRollout, **SMALL)}
    config = ClusterConfig(
        **fields,
        role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
        rollout_config=rollout_config(temperature=1.0),
        training_config=RLTrainingConfig(
            actor_optimizer=optax.adam(1e-2),
            eval_every_n_steps=1000,
            max_steps=NUM_STEPS,
            mini_batch_size=BATCH,
            train_micro_batch_size=BATCH,
        ),
    )
    arguments: dict[str, Any] = {"actor": model, "tokenizer": EndingTokenizer(eos=EOS)}
    cluster: Any = RLCluster(**arguments, cluster_config=config)
    rollout = cluster.rollout
    try:
        learner = GRPOLearner(
            cluster, GRPOConfig(num_generations=NUM_GENERATIONS, beta=0.0), reward
        )
        batches: Any = [{"prompts": np.array(PROMPTS)}] * NUM_STEPS
        learner.train(batches)
        assert isinstance(rollout, SglJaxRollout)
        assert (cluster.global_steps, rollout.weight_version) == (NUM_STEPS, NUM_STEPS)
        assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.1, rewards
        with ref.deprecations_ignored():
            report = mismatch_report(
                rollout,
                cluster.actor_trainer.model,
                PROMPTS,
                rollout_config=rollout_config(temperature=1.0, seed=3),
            )
        assert report.is_within(), report
    finally:
        rollout.close()
