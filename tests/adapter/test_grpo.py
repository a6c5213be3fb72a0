"""Real GRPO steps by Tunix's own learner: every way in, every call that it makes."""

from __future__ import annotations

import functools
import gc
from typing import Any

import numpy as np
import psutil
import pytest
from tunix.rl.grpo.grpo_learner import GRPOLearner
from tunix.rl.rl_cluster import Mode
from tunix.rl.rl_cluster import RLCluster as TunixRLCluster
from tunix.rl.rollout.base_rollout import CacheConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

from sgljax_engine import InvalidConfigError
from tests import tunix_reference as ref
from tests import tunix_releases
from tests.adapter.grpo_parts import (
    EOS,
    MODEL,
    NUM_STEPS,
    PROMPTS,
    check_trained,
    grain_batches,
    grpo_config,
    list_batches,
    make_parts,
    reward,
    rollout_config,
)
from tests.geometry import SMALL
from tunix_sgljax import GrpoLearner, RLCluster, SglJaxRollout, create_sgljax_rollout

PARTIAL = functools.partial(SglJaxRollout, **SMALL)

# Warnings of Tunix itself and of what it uses, while it trains.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def closing():
    """Closes the rollouts that are put into it."""
    rollouts = []
    yield rollouts
    for rollout in rollouts:
        rollout.close()


# ------------------------------------------------------------------ three ways in


@pytest.mark.parametrize(
    "sizes", [pytest.param({}, marks=pytest.mark.soak), {**SMALL}], ids=["default", "small"]
)
def test_class_as_the_rollout_engine(closing, sizes):
    """The one-line switch."""
    config = rollout_config(rollout_sglang_jax_kwargs=sizes)
    parts = make_parts(rollout_engine=SglJaxRollout, rollout_config=config)
    cluster: Any = TunixRLCluster(**parts.arguments)
    closing.append(cluster.rollout)
    assert cluster.rollout.weight_version == 0
    learner = GRPOLearner(cluster, grpo_config(), reward)
    assert learner.should_sync_weights
    learner.train(grain_batches())
    check_trained(cluster)


@pytest.mark.slow
def test_rollout_worker_made_beforehand(closing):
    """As in the rollout's specification: a factory, then `rollout_worker=`."""
    parts = make_parts()
    rollout = create_sgljax_rollout(
        model=parts.model,
        tokenizer=parts.arguments["tokenizer"],
        model_config=parts.model.config,
        mesh=parts.mesh,
        rollout_config=rollout_config(),
        **SMALL,
    )
    closing.append(rollout)
    cluster = RLCluster(**parts.arguments, rollout_worker=rollout)
    assert cluster.rollout is rollout
    learner = GrpoLearner(cluster, reward, grpo_config())
    learner.train(list_batches())
    check_trained(cluster)
    assert rollout.engine.max_model_len == 128


# ------------------------------------------------------------------ more of what Tunix does


def test_old_log_probs_are_those_of_the_weights_that_sampled(closing):
    parts = make_parts(rollout_engine=PARTIAL)
    cluster: Any = TunixRLCluster(**parts.arguments)
    closing.append(cluster.rollout)
    output = cluster.generate(PROMPTS, micro_batch_size=2)
    assert output.left_padded_prompt_tokens.shape == (4, 8)
    completions = np.zeros((4, 8), np.int32)
    for row, tokens in zip(completions, output.tokens, strict=True):
        row[: len(tokens)] = tokens
    arguments = (output.left_padded_prompt_tokens, completions)
    old = cluster.get_old_per_token_logps(*arguments, micro_batch_size=2)
    actor = cluster.get_actor_per_token_logps(*arguments, pad_id=ref.PAD_ID, eos_id=EOS)
    # Tunix's trainer takes a sampled padding token for padding, and what follows does not see it.
    is_real = np.cumprod(completions != ref.PAD_ID, axis=1, dtype=bool)
    np.testing.assert_allclose(
        np.asarray(old)[is_real], np.asarray(actor)[is_real], atol=1e-4, rtol=0
    )


def train_watched(closing, *, offload_to_cpu, num_iterations):
    """A run with evaluations: the cluster, all rewards, and the engine's state at each reward."""
    rewards, states = [], []

    def watching_reward(prompts, completions, **kwargs):
        states.append(cluster.rollout.engine.get_internal_state())
        rewards.extend(found := reward(prompts, completions, **kwargs))
        return found

    configs = {
        Mode.TRAIN: rollout_config(seed=3, return_logprobs=True),
        Mode.EVAL: rollout_config(temperature=0.0, return_logprobs=True),
    }
    parts = make_parts(
        rollout_engine=PARTIAL,
        rollout_config=configs,
        max_steps=num_iterations * NUM_STEPS,
        offload_to_cpu=offload_to_cpu,
    )
    parts.arguments["cluster_config"].training_config.eval_every_n_steps = 1
    cluster: Any = TunixRLCluster(**parts.arguments)
    closing.append(cluster.rollout)
    learner = GRPOLearner(cluster, grpo_config(num_iterations=num_iterations), watching_reward)
    learner.train(list_batches(), list_batches()[:1])
    return cluster, rewards, states


@pytest.mark.slow
def test_models_offloaded_to_the_host(closing):
    """`offload_to_cpu` passes empty states around generation and host arrays elsewhere.

    The rollout has nothing on the device whenever Tunix does anything else, and the run is what it
    is without.
    """
    num_iterations = 2
    plain, expected, _ = train_watched(closing, offload_to_cpu=False, num_iterations=num_iterations)
    assert plain.rollout.engine.get_internal_state().counters.num_sleeps == 0
    cluster, rewards, states = train_watched(
        closing, offload_to_cpu=True, num_iterations=num_iterations
    )
    assert rewards == expected
    num_calls = len(states)
    assert num_calls > NUM_STEPS  # evaluations too
    states.append(cluster.rollout.engine.get_internal_state())
    assert {state.asleep for state in states} == {("weights", "kv_cache")}
    # Tunix hands the actor over when it moves it too: when the cluster is made, before there is any
    # sign of offloading, and before and after it trains on a batch.
    num_updates = 1 + (1 + 2 * num_iterations) * NUM_STEPS
    # Each update and each call of the cluster ends in one sleep. More iterations ask for log-probs,
    # unless Tunix takes those that sampling returned.
    asks = num_iterations > 1 and not tunix_releases.GRPO_USES_ROLLOUT_LOGPS
    num_calls *= 2 if asks else 1
    assert states[-1].counters.num_sleeps == num_updates - 1 + num_calls
    check_trained(cluster, num_updates)


# ------------------------------------------------------------------ rollout_worker


def test_what_is_no_rollout_is_refused():
    parts = make_parts()
    workers: list[Any] = [object(), SglJaxRollout, "vanilla"]
    for worker in workers:
        with pytest.raises(InvalidConfigError, match=r"rollout_worker.*BaseRollout"):
            RLCluster(**parts.arguments, rollout_worker=worker)


def test_without_a_worker_it_is_tunixs_cluster():
    parts = make_parts()
    assert isinstance(RLCluster(**parts.arguments).rollout, VanillaRollout)


def test_a_workers_config_is_checked_and_taken_over(closing):
    parts = make_parts(rollout_config=rollout_config(rollout_vllm_server_mode=True))
    rollout = create_sgljax_rollout(
        parts.model, parts.arguments["tokenizer"], strict_config=True, **SMALL
    )
    closing.append(rollout)
    with pytest.raises(InvalidConfigError, match="rollout_vllm_server_mode"):
        RLCluster(**parts.arguments, rollout_worker=rollout)

    parts = make_parts(rollout_config=rollout_config(rollout_sglang_jax_context_length=40))
    RLCluster(**parts.arguments, rollout_worker=rollout)
    assert rollout.engine.max_model_len == 40


def test_another_engines_worker_is_welcome():
    """Any BaseRollout, Tunix's own among them."""
    parts = make_parts()
    worker = VanillaRollout(parts.model, parts.arguments["tokenizer"], cache_config())
    assert RLCluster(**parts.arguments, rollout_worker=worker).rollout is worker


def cache_config():
    return CacheConfig(
        cache_size=32,
        num_layers=MODEL["num_layers"],
        num_kv_heads=MODEL["num_kv_heads"],
        head_dim=MODEL["head_dim"],
    )


# ------------------------------------------------------------------ many steps


@pytest.mark.slow
def test_fifty_steps_keep_memory_flat_and_compile_nothing(closing):
    """Fifty updates synced by Tunix's learner itself."""
    num_steps, every = 60, 5
    process = psutil.Process()
    resident, programs = [], []

    def watching_reward(prompts, completions, **kwargs):
        programs.append(cluster.rollout.engine.get_internal_state().num_compiles)
        if len(programs) % every == 0:
            gc.collect()
            resident.append(process.memory_info().rss)
        return reward(prompts, completions, **kwargs)

    parts = make_parts(rollout_engine=PARTIAL, max_steps=num_steps)
    cluster: Any = TunixRLCluster(**parts.arguments)
    closing.append(cluster.rollout)
    cluster.rollout.engine.warmup()
    batches = list_batches() * (num_steps // len(list_batches()))
    GRPOLearner(cluster, grpo_config(), watching_reward).train(batches)

    assert cluster.rollout.weight_version == len(programs) == num_steps
    assert len(resident) == num_steps // every
    assert max(resident[2:]) < resident[2] * 1.05
    assert len(set(programs)) == 1
