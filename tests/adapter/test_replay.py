"""Sampling replay: the trainer's log-probs over the tokens that the sampler allowed."""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tunix.rl import rl_cluster as tunix_cluster
from tunix.rl.common import compute_per_token_logps
from tunix.rl.grpo.grpo_learner import GRPOLearner
from tunix.rl.ppo.ppo_learner import PPOConfig
from tunix.rl.rl_cluster import RLCluster, Role
from tunix.rl.utils import create_critic_model

from sgljax_engine import InvalidConfigError
from tests import lora_models
from tests import tunix_reference as ref
from tests.adapter import agentic_parts
from tests.adapter.grpo_parts import (
    MODEL,
    NUM_STEPS,
    PROMPTS,
    TEMPERATURE,
    grpo_config,
    list_batches,
    make_parts,
    one_device_mesh,
    reward,
    rollout_config,
)
from tests.adapter.helpers import new_rollout, params_of
from tests.geometry import SMALL
from tunix_sgljax import (
    GrpoLearner,
    OverSampling,
    OverSamplingGrpoLearner,
    PpoLearner,
    SglJaxRollout,
    mismatch_report,
)
from tunix_sgljax import RLCluster as OurCluster
from tunix_sgljax.exactness.masked_model import masked_model
from tunix_sgljax.padding import pad_masks

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix

TRUNCATED = {"top_k": 5, "top_p": 0.9}


def all_logits(model: nnx.Module, example: Any, temperature: float = TEMPERATURE) -> np.ndarray:
    """The scaled logits [B, C, V] that a completion's tokens come from, in float64."""
    tokens = jnp.concatenate([example.prompt_ids, example.completion_ids], axis=1)
    is_token = tokens != ref.PAD_ID
    positions = jnp.maximum(jnp.cumsum(is_token, axis=1) - 1, 0)
    causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
    logits, _ = model(tokens, positions, None, causal[None] & is_token[:, None])
    first = example.prompt_ids.shape[1] - 1
    return np.asarray(logits, np.float64)[:, first:-1] / temperature


def over_masks(logits: np.ndarray, example: Any) -> np.ndarray:
    """Log-probs [B, C] of the completion over its masks, in float64; NaN without a mask."""
    masks_BCN, ids_BC = np.asarray(example.sampling_masks), np.asarray(example.completion_ids)
    found = np.full(ids_BC.shape, np.nan)
    for row, column in np.argwhere(masks_BCN[:, :, 0] >= 0):
        mask = masks_BCN[row, column]
        mask, at = mask[mask >= 0], logits[row, column]
        assert ids_BC[row, column] in mask
        found[row, column] = at[ids_BC[row, column]] - np.logaddexp.reduce(at[mask])
    return found


class Run:
    """A training, its examples, and the policy before each step."""

    def __init__(
        self, make_learner, *, options=None, sampling=None, cluster=RLCluster, actor=None, **changes
    ):
        self.examples: list[Any] = []
        self.steps: list[int] = []
        self.policies: dict[int, Any] = {}
        fields = TRUNCATED if sampling is None else sampling
        changes = {
            "rollout_config": rollout_config(**fields),
            "rollout_engine": functools.partial(SglJaxRollout, **SMALL, **(options or {})),
            **changes,
        }
        arguments = make_parts(max_steps=2 * NUM_STEPS, **changes).arguments
        if actor is not None:
            arguments["actor"] = actor(arguments["reference"])
        if cluster is not RLCluster:
            arguments["reference"] = None
        self.cluster: Any = cluster(**arguments)
        self.learner = make_learner(self.cluster)
        update = self.cluster.update_actor

        def watched(examples, *args):
            params = jax.tree.map(np.array, params_of(self.cluster.actor_trainer.model))
            step = self.cluster.global_steps
            self.policies.setdefault(step, params)
            self.examples.extend(examples)
            self.steps.extend([step] * len(examples))
            update(examples, *args)

        self.cluster.update_actor = watched

    def train(self, data=None):
        try:
            self.learner.train(list_batches() if data is None else data)
        finally:
            self.cluster.rollout.close()
        return self

    def log_ratios(self, model: Any = None) -> np.ndarray:
        """The log-ratio of each trained token, before the first update of its step."""
        model, found = model or ref.make_tunix_qwen3(MODEL), []
        for example, step in zip(self.examples, self.steps, strict=True):
            nnx.update(model, jax.tree.map(jnp.asarray, self.policies[step]))
            current = over_masks(all_logits(model, example), example)
            is_sampled = ~np.isnan(current) & np.asarray(example.completion_mask).astype(bool)
            found.append((current - np.asarray(example.old_per_token_logps))[is_sampled])
        return np.concatenate(found)

    def reference_error(self) -> float:
        """How far the reference's log-probs are from those over the masks, at most."""
        reference, errors = ref.make_tunix_qwen3(MODEL), []
        for example in self.examples:
            expected = over_masks(all_logits(reference, example), example)
            found = np.asarray(example.ref_per_token_logps)
            errors.append(np.abs(found - expected)[~np.isnan(expected)])
        return float(np.concatenate(errors).max())


def grpo(cluster, *, replay="auto", **changes):
    return GrpoLearner(cluster, reward, grpo_config(num_iterations=2, **changes), replay=replay)


@pytest.fixture(scope="module")
def replayed():
    return Run(grpo).train()


def test_log_probs_are_those_over_the_masks(replayed):
    """Through Tunix's own function, whose gradients and entropy stay finite."""
    model, example = ref.make_tunix_qwen3(MODEL), replayed.examples[0]
    expected = over_masks(all_logits(model, example), example)

    def logps(model: nnx.Module) -> Any:
        graphdef, state = nnx.split(masked_model(model, jnp.asarray(example.sampling_masks)))
        found, logits = compute_per_token_logps(
            graphdef,
            state,
            prompt_tokens=example.prompt_ids,
            completion_tokens=example.completion_ids,
            pad_id=ref.PAD_ID,
            eos_id=ref.NO_EOS_ID,
            stop_gradient=False,
            return_logits=True,
            temperature=TEMPERATURE,
        )
        weights = jax.nn.softmax(logits)
        entropy = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(weights * logits, axis=-1)
        return jnp.sum(found) + jnp.sum(entropy), found

    (_, found), gradients = nnx.value_and_grad(logps, has_aux=True)(model)
    is_masked = ~np.isnan(expected)
    assert is_masked.sum() > 20
    assert np.abs(np.asarray(found) - expected)[is_masked].max() < 3e-5
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_a_position_without_a_mask_keeps_all_tokens(replayed):
    model, example = ref.make_tunix_qwen3(MODEL), replayed.examples[0]
    none = jnp.full_like(jnp.asarray(example.sampling_masks), -1)
    tokens = jnp.concatenate([example.prompt_ids, example.completion_ids], axis=1)
    mask = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))[None]
    positions = jnp.arange(tokens.shape[1])[None] + jnp.zeros_like(tokens)
    given = tokens, positions, None, mask
    np.testing.assert_array_equal(masked_model(model, none)(*given)[0], model(*given)[0])


def test_the_ratio_is_one_before_the_first_update(replayed):
    ratios = replayed.log_ratios()
    assert len(ratios) > 50
    assert np.abs(ratios).mean() < 1e-4
    assert len(replayed.policies) == NUM_STEPS


def test_off_is_tunix_learner():
    run = Run(functools.partial(grpo, replay="off")).train()
    assert not any(hasattr(example, "sampling_masks") for example in run.examples)


def test_the_references_log_probs_are_over_the_masks(replayed):
    assert replayed.reference_error() < 3e-5


def with_pairs(base: Any) -> Any:
    return lora_models.add_pairs(base, lora_models.RULES["mlp"])


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [RLCluster, OurCluster])
def test_lora_actors_replay(cluster):
    """Without a reference model it is the actor without its pairs, which learn and are not it."""
    run = Run(grpo, cluster=cluster, actor=with_pairs, options={"lora": "adapter"}).train()
    assert run.reference_error() < 3e-5
    model = with_pairs(ref.make_tunix_qwen3(MODEL))
    assert np.abs(run.log_ratios(model)).mean() < 1e-4
    last = run.examples[-1]
    current = over_masks(all_logits(model, last), last)
    assert np.nanmax(np.abs(current - np.asarray(last.ref_per_token_logps))) > 1e-2


def test_the_loss_sees_the_masks(replayed):
    """At the first step policy and reference are one: over the masks their KL is 0."""
    loss = replayed.cluster.actor_trainer.loss_fn
    model, example = ref.make_tunix_qwen3(MODEL), replayed.examples[0]
    _, metrics = loss(model, example, replayed.learner.algo_config)
    assert abs(float(metrics["kl"])) < 1e-6
    bare = example.replace(sampling_masks=None)
    _, metrics = loss(model, bare, replayed.learner.algo_config)
    assert abs(float(metrics["kl"])) > 1e-3


def test_over_sampling_replays():
    def learner(cluster):
        return OverSamplingGrpoLearner(
            cluster, grpo_config(beta=0.0), reward_of_some, over_sampling=OverSampling(factor=2.0)
        )

    def reward_of_some(prompts, completions, **_):
        return [sum(int(word) % 2 for word in text.split()) / 8 for text in completions]

    run = Run(learner, sampling={"top_p": 0.8}).train()
    assert all(example.sampling_masks.shape[2] == 512 for example in run.examples)
    assert all(example.token_versions is not None for example in run.examples)
    first = run.examples[0]  # all of it was sampled by the first policy
    model = ref.make_tunix_qwen3(MODEL)
    current = over_masks(all_logits(model, first), first)
    is_sampled = ~np.isnan(current)
    old = np.asarray(first.old_per_token_logps)
    assert np.abs(current - old)[is_sampled].max() < 1e-4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:scatter inputs:FutureWarning")  # of Tunix's trainer
def test_ppo_replays_at_a_temperature_of_one(caplog):
    shape = MODEL | {"use_tied_embedding": False}
    actor, mesh = ref.make_tunix_qwen3(shape), one_device_mesh()
    roles = (Role.ACTOR, Role.REFERENCE, Role.ROLLOUT, Role.CRITIC)
    for temperature in (1.0, 0.8):
        parts = make_parts(
            meshes=dict.fromkeys(roles, mesh),
            rollout_config=rollout_config(temperature=temperature, **TRUNCATED),
            rollout_engine=functools.partial(SglJaxRollout, **SMALL),
        )
        critic = create_critic_model(actor)
        parts.arguments |= {"actor": actor, "reference": ref.make_tunix_qwen3(shape)}
        parts.arguments["cluster_config"].training_config.critic_optimizer = optax.adam(1e-2)
        cluster: Any = RLCluster(**parts.arguments, critic=critic)
        learner = PpoLearner(cluster, PPOConfig(beta=0.0), ppo_reward)
        assert (learner._replay is not None) == (temperature == 1.0)
        if learner._replay is not None:
            example = learner._generate_and_compute_advantage(
                {"prompts": np.array(PROMPTS)}, tunix_cluster.Mode.TRAIN
            )
            current = over_masks(all_logits(actor, example, temperature), example)
            old = np.asarray(example.old_per_token_logps)
            assert np.nanmax(np.abs(current - old)) < 1e-4
            assert np.count_nonzero(~np.isnan(current)) > 15
        cluster.rollout.close()
    assert "it needs a temperature of 1 in PPO, got 0.8" in caplog.text


def ppo_reward(prompts, completions, **_):
    return [float(len(text) % 2) for text in completions]


@pytest.mark.parametrize("in_consumer", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_episodes_of_turns_replay(in_consumer):
    """Tokens of the environment have no masks; log-probs of the others are over theirs."""
    cluster = agentic_parts.make_cluster(
        num_steps=2, in_consumer=in_consumer, sampling={"top_k": 5}, eos=agentic_parts.OFTEN
    )
    parser = agentic_parts.Parser(agentic_parts.OFTEN)
    learner = agentic_parts.make_learner(cluster, env_class=agentic_parts.Turns, parser=parser)
    try:
        agentic_parts.train(learner, 2)
    finally:
        cluster.rollout.close()
    model, num_sampled = ref.make_tunix_qwen3(MODEL), 0
    reference = ref.make_tunix_qwen3(MODEL)
    for example in cluster.examples:
        has_mask = np.asarray(example.sampling_masks)[:, :, 0] >= 0
        versions = np.asarray(example.token_versions)
        np.testing.assert_array_equal(has_mask, versions >= 0)
        current = over_masks(all_logits(model, example), example)
        is_first = versions == 0  # sampled by the policy that `model` still is
        old = np.asarray(example.old_per_token_logps)
        assert np.abs(current - old)[is_first].max(initial=0) < 1e-4
        expected = over_masks(all_logits(reference, example), example)
        found = np.asarray(example.ref_per_token_logps)
        assert np.abs(expected - found)[has_mask].max(initial=0) < 3e-5
        num_sampled += is_first.sum()
    assert num_sampled > 10


def test_the_mismatch_report_is_over_the_masks():
    model = ref.make_tunix_qwen3(MODEL)
    config = rollout_config(**TRUNCATED)
    rollout = new_rollout(model, rollout_config=config)
    rollout.report_sampling_masks()
    report = mismatch_report(rollout, model, PROMPTS)
    rollout.close()
    assert report.is_within(), report
    assert report.sampler.min() < -0.1


# ------------------------------------------------------------------ when it is on


@pytest.mark.parametrize(
    ("sampling", "is_on"),
    [
        ({}, False),
        ({"top_k": -1, "top_p": 1.0}, False),
        ({"top_k": 50}, True),
        ({"top_p": 0.9}, True),
        ({"temperature": 0.0, "top_k": 3}, False),
    ],
)
def test_auto_is_on_where_filters_leave_out_tokens(sampling, is_on, caplog):
    with caplog.at_level(logging.INFO):
        run = Run(grpo, sampling=sampling)
    assert (run.learner._replay is not None) == is_on
    lines = [r.message for r in caplog.records if "sampling replay" in r.message]
    assert len(lines) == is_on
    run.cluster.rollout.close()


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({}, {"replay": "on"}, r"replay must be one of \('auto', 'support', 'off'\), got 'on'"),
        ({"sampling_params": {"repetition_penalty": 1.2}}, {}, "goes without penalties"),
        ({"logprobs_mode": "trainer_match"}, {}, "goes without logprobs_mode='trainer_match'"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(options, changes, message):
    learner = functools.partial(grpo, **{"replay": "support", **changes})
    with pytest.raises(InvalidConfigError, match=message):
        Run(learner, options=options)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"options": {"sampling_params": {"presence_penalty": 0.5}}}, "goes without penalties"),
        ({"sampling": {"top_k": 513}}, "top_k must be at most 512"),
    ],
)
def test_auto_says_why_it_is_off(changes, reason, caplog):
    run = Run(grpo, **changes)
    assert run.learner._replay is None
    assert "sampling replay is off: it " in caplog.text
    assert reason in caplog.text
    run.cluster.rollout.close()


def test_tunix_learner_is_told_the_size_of_the_difference(caplog):
    def learner(cluster):
        return GRPOLearner(cluster, grpo_config(), reward)

    Run(learner).train()
    lines = [r.message for r in caplog.records if "replay" in r.message]
    assert len(lines) == 1, f"{NUM_STEPS} steps"
    assert "differ by 0." in lines[0]
    assert "GrpoLearner" in lines[0]


def test_padding_of_masks():
    masks = [[np.array([3, 4]), np.array([5])], []]
    padded = pad_masks(masks, width=3, size=2)
    assert padded.tolist() == [[[3, 4], [5, -1], [-1, -1]], [[-1, -1]] * 3]
