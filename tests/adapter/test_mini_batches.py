"""Several optimizer steps on one batch: mini-batches are sampled as by Tunix's vanilla engine."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from tunix.rl import function_registry
from tunix.rl.grpo.grpo_learner import GRPOLearner
from tunix.rl.rl_cluster import RLCluster, RLTrainingConfig

from tests.adapter import grpo_parts as parts
from tests.adapter.helpers import params_of
from tests.geometry import SMALL
from tunix_sgljax import OverSampling, OverSamplingGrpoLearner, SglJaxRollout

NUM_STEPS = 2
ENGINE = functools.partial(SglJaxRollout, **SMALL)

# Warnings of Tunix itself and of what it uses, while it trains.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def estimate(rewards, **_):
    """Rewards as advantages: equal samples of a group, which are greedy here, still teach."""
    return np.asarray(rewards, np.float32)


@pytest.fixture(autouse=True, scope="module")
def _registered():
    function_registry.register_advantage_estimator("rewards")(estimate)


def make_cluster(engine, num_iterations=1, **sampling) -> Any:
    """Batches of four prompts, trained on one by one; greedy, so that the weights alone decide."""
    num_updates = NUM_STEPS * len(parts.PROMPTS) * num_iterations
    training = RLTrainingConfig(
        actor_optimizer=optax.adam(1e-2),
        eval_every_n_steps=100,
        max_steps=num_updates,
        mini_batch_size=1,
        train_micro_batch_size=1,
        rollout_micro_batch_size=1,
        compute_logps_micro_batch_size=1,
    )
    made = parts.make_parts(
        rollout_engine=engine,
        training_config=training,
        # At temperature 1, since vanilla's old log-probs ignore it.
        rollout_config=parts.rollout_config(temperature=1.0, **sampling),
    )
    return RLCluster(**made.arguments)


def train(cluster, make_learner=GRPOLearner, num_iterations=1) -> list[tuple[str, ...]]:
    """The completions of each mini-batch."""
    seen = []

    def reward(prompts, completions, **_):
        seen.append(tuple(completions))
        ids = [[int(word) for word in text.split()] for text in completions]
        return [sum(token % 2 == 0 for token in row) / (len(row) or 1) - 0.4 for row in ids]

    config = parts.grpo_config(num_iterations=num_iterations, beta=0.0)
    config.advantage_estimator = "rewards"
    batch: dict[str, Any] = {"prompts": np.array(parts.PROMPTS)}
    make_learner(cluster, config, reward).train([batch] * NUM_STEPS)
    return seen


def over_sampled(cluster, config, reward):
    """Our learner, with no more groups in work than it trains on."""
    options = OverSampling(factor=1.0)
    return OverSamplingGrpoLearner(cluster, config, reward, over_sampling=options)


@pytest.mark.parametrize(
    ("make_learner", "num_iterations"),
    [
        pytest.param(GRPOLearner, 1, marks=pytest.mark.slow),
        pytest.param(GRPOLearner, 2, marks=pytest.mark.soak),
        pytest.param(over_sampled, 1, marks=pytest.mark.soak),
    ],
)
def test_a_training_is_that_of_vanilla(make_learner, num_iterations):
    """The same samples of each mini-batch, and the same weights at the end."""
    vanilla = make_cluster("vanilla", num_iterations, top_p=None)  # None makes it greedy
    wanted = train(vanilla, num_iterations=num_iterations)
    cluster = make_cluster(ENGINE, num_iterations, top_k=1)
    assert train(cluster, make_learner, num_iterations) == wanted
    assert len(set(wanted)) > len(wanted) // 2  # the weights change what is sampled
    assert cluster.rollout.weight_version == cluster.actor_trainer.train_steps // num_iterations
    both = [jax.tree.leaves(params_of(each.actor_trainer.model)) for each in (vanilla, cluster)]
    for left, right in zip(*both, strict=True):
        np.testing.assert_allclose(left, right, atol=2e-3)
    cluster.rollout.close()


def test_only_a_learner_whose_trainer_has_moved_updates_the_weights():
    """Agents and the user's own calls sample with the weights that the learner has synced."""
    cluster = make_cluster(ENGINE, top_k=1)
    rollout, trainer = cluster.rollout, cluster.actor_trainer
    rollout.engine  # noqa: B018  built with the weights of now
    rollout.follow_trainer()
    assert rollout.weight_version == 0
    nnx.update(trainer.model, jax.tree.map(lambda x: 1.1 * x, params_of(trainer.model)))
    trainer._train_steps += 1
    assert rollout.find_differing_weights(params_of(trainer.model)) != []
    cluster.generate(parts.PROMPTS)
    assert rollout.weight_version == 0
    for _ in range(2):
        rollout.follow_trainer()
        assert rollout.weight_version == 1
    assert rollout.find_differing_weights(params_of(trainer.model)) == []
    rollout.close()
