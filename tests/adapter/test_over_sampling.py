"""Over-sampling: steps that end before their longest answers, and groups that go on."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tunix.rl.rl_cluster import Mode
from tunix.rl.rl_cluster import RLCluster as TunixRLCluster

from sgljax_engine import InvalidConfigError, InvalidRequestError
from tests import tunix_reference as ref
from tests.adapter.grpo_parts import (
    MODEL,
    NUM_GENERATIONS,
    PROMPTS,
    PROMPTS_PER_STEP,
    TEMPERATURE,
    grpo_config,
    make_parts,
    rollout_config,
)
from tests.adapter.helpers import params_of
from tests.devices import run_python
from tests.geometry import SMALL
from tests.threads import LIMIT_S
from tunix_sgljax import OverSampling, OverSamplingGrpoLearner, SglJaxRollout
from tunix_sgljax.in_flight.outputs import PreparedOutputs, VersionedRolloutOutput
from tunix_sgljax.long_tail.feed import ROW, PromptFeed

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix

NUM_PROMPTS = 12


class TestFeed:
    def batches(self, count=3, size=2):
        return [
            {"prompts": np.array([f"p{i * size + j}" for j in range(size)]), "n": np.arange(size)}
            for i in range(count)
        ]

    def test_gives_tunix_the_same_batches(self):
        batches = list(PromptFeed(self.batches()))
        assert [batch["prompts"].tolist() for batch in batches] == [
            ["p0", "p1"],
            ["p2", "p3"],
            ["p4", "p5"],
        ]
        assert [batch[ROW].tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5]]
        assert batches[0]["n"].tolist() == [0, 1]

    def test_prompts_taken_early_are_owed_until_the_end(self):
        feed = PromptFeed(self.batches())
        assert next(feed)[ROW].tolist() == [0, 1]
        assert [row.number for row in feed.take_early(1, is_owed=True)] == [2]
        assert [batch[ROW].tolist() for batch in feed] == [[3, 4], [5, 2]]

    def test_prompts_that_are_used_up_do_not_come_again(self):
        feed = PromptFeed(self.batches())
        next(feed)
        assert len(feed.take_early(1, is_owed=False)) == 1
        assert [batch[ROW].tolist() for batch in feed] == [[3, 4]]

    def test_the_last_batch_may_be_smaller(self):
        feed = PromptFeed([*self.batches(1, 3), *self.batches(1, 2)])
        assert [len(batch["prompts"]) for batch in feed] == [3, 2]
        assert feed.take_early(5, is_owed=True) == []


class TestConfig:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"factor": 0.5}, r"factor must be in \[1, 2\] with unfinished='carry', got 0.5"),
            ({"factor": 2.5}, r"factor must be in \[1, 2\]"),
            ({"factor": 20, "unfinished": "drop"}, r"factor must be in \[1, 16\]"),
            ({"factor": True}, "factor"),
            ({"unfinished": "keep"}, "unfinished must be one of"),
            ({"max_age": 0}, "max_age must be an integer >= 1, got 0"),
            ({"max_age": 1.5}, "max_age"),
            ({"factor": 2.5, "unfinished": "abort"}, r"factor must be in \[1, 2\]"),
            ({"known_rewards": "mine"}, "known_rewards must be a function or None, got 'mine'"),
        ],
    )
    def test_bad_values_are_refused_by_name(self, options, message):
        with pytest.raises(InvalidConfigError, match=message):
            OverSampling(**options)

    def test_groups_are_rounded(self):
        assert OverSampling(factor=1.25).num_asked(4) == 5
        assert OverSampling().num_asked(1) == 1


def test_prepared_outputs_are_given_in_order():
    prepared = PreparedOutputs()
    assert prepared.take(2) is None
    output = VersionedRolloutOutput(
        text=["a", "b", "c"],
        logits=[],
        tokens=[np.array([1]), np.array([2]), np.array([3])],
        left_padded_prompt_tokens=np.arange(3)[:, None],
        logprobs=None,
        weight_versions=[np.array([0])] * 3,
    )
    with prepared.giving(output):
        first = prepared.take(2)
        assert first is not None
        assert first.text == ["a", "b"]
        second = prepared.take(1)
        assert second is not None
        assert second.left_padded_prompt_tokens.tolist() == [[2]]
        with pytest.raises(InvalidRequestError, match="asked for 1 completions, and 0"):
            prepared.take(1)
    assert prepared.take(1) is None


# ------------------------------------------------------------------ trainings


def make_data():
    """Prompts that are all different, so that each is recognised."""
    prompts = [f"{2 + i} {3 + i} {PROMPTS[i % len(PROMPTS)]}" for i in range(NUM_PROMPTS)]
    return [
        {"prompts": np.array(prompts[i : i + PROMPTS_PER_STEP])}
        for i in range(0, NUM_PROMPTS, PROMPTS_PER_STEP)
    ]


class Run:
    """A training, with what its learner trained on."""

    def __init__(self, over_sampling, *, grpo=None, options=None, **changes):
        self.rewarded: list[str] = []
        self.num_evaluated = 0
        self.error: Exception | None = None
        self.examples: list[Any] = []
        self.versions: list[int] = []
        self.policies: dict[int, Any] = {}
        training = {
            "rollout_config": rollout_config(max_tokens_to_generate=24, max_prompt_length=16),
            "rollout_engine": functools.partial(SglJaxRollout, **SMALL, **(options or {})),
        }
        parts = make_parts(max_steps=100, **(training | changes))
        self.cluster: Any = TunixRLCluster(**parts.arguments)
        self.learner = OverSamplingGrpoLearner(
            self.cluster, grpo or grpo_config(beta=0.0), self.reward, over_sampling=over_sampling
        )
        update = self.cluster.update_actor

        def watched(examples, *args):
            self.examples.extend(examples)
            step = self.cluster.global_steps
            self.versions.extend([step] * len(examples))
            self.policies[step] = jax.tree.map(
                np.array, params_of(self.cluster.actor_trainer.model)
            )
            update(examples, *args)

        self.cluster.update_actor = watched
        self.metrics: dict[str, list[float]] = {}
        self.cluster.with_external_metrics_logger(self.note)

    def note(self, buffer):
        for name, (values, _) in buffer.metrics.items():
            self.metrics.setdefault(name, []).extend(values)

    def reward(self, prompts, completions, mode, **_):
        if self.error is not None:
            raise self.error
        if mode == str(Mode.TRAIN):
            self.rewarded.extend(prompts[::NUM_GENERATIONS])
        else:
            self.num_evaluated += len(prompts)
        return [sum(int(word) % 2 for word in text.split()) / 24 for text in completions]

    def train(self, data=None, evaluated=None):
        """Trains and closes; returns itself."""
        try:
            self.learner.train(make_data() if data is None else data, evaluated)
            engine = self.cluster.rollout.engine
            engine.check_integrity()
            state = engine.get_internal_state()
            assert (state.running_batch_size, state.waiting_queue_size) == (0, 0)
            assert state.pause_mode is None
        finally:
            self.cluster.rollout.close()
        return self


def all_prompts():
    return sorted(str(prompt) for batch in make_data() for prompt in batch["prompts"])


def check_ages(run, max_age):
    """Ages of trained tokens, and whether any sample has tokens of two policies."""
    ages, mixed = [], False
    for example, step in zip(run.examples, run.versions, strict=True):
        mask = np.asarray(example.completion_mask).astype(bool)
        versions = np.asarray(example.token_versions)
        assert (versions[mask] >= 0).all()  # Tunix masks a sampled pad id, too
        ages.extend((step - versions[mask]).tolist())
        mixed |= any(len(set(row[row >= 0])) > 1 for row in versions)
    assert 0 <= min(ages) <= max(ages) <= max_age
    return max(ages), mixed


def check_logprobs(run):
    """Each old log-prob is Tunix's own, under the weights that sampled the token."""
    model = ref.make_tunix_qwen3(MODEL)
    differences = []
    for version, params in run.policies.items():
        nnx.update(model, jax.tree.map(jnp.asarray, params))
        for example in run.examples:
            prompts = [row[row != 0] for row in np.asarray(example.prompt_ids)]
            versions_BC = np.asarray(example.token_versions)
            lengths = (versions_BC >= 0).sum(-1)
            rows = zip(np.asarray(example.completion_ids), lengths, strict=True)
            completions = [row[:length] for row, length in rows]
            whole = [row for row, ids in enumerate(completions) if ids.all()]  # without pad ids
            found = ref.trainer_logps(
                model,
                [prompts[row] for row in whole],
                [completions[row] for row in whole],
                temperature=TEMPERATURE,
            )
            for row, want in zip(whole, found, strict=True):
                got = np.asarray(example.old_per_token_logps)[row, : len(want)]
                differences.extend(np.abs(want - got)[versions_BC[row, : len(want)] == version])
    assert len(differences) > 100
    assert max(differences) < 1e-3


@pytest.mark.parametrize("mode", [pytest.param("retract", marks=pytest.mark.slow), "in_place"])
def test_carried_groups_are_trained_once_and_are_right(mode):
    run = Run(OverSampling(factor=2.0), options={"weight_update_mode": mode}).train()
    # Nothing is lost, nothing is trained on twice, and there are as many steps as without.
    assert sorted(map(str, run.rewarded)) == all_prompts()
    assert run.cluster.global_steps == NUM_PROMPTS // PROMPTS_PER_STEP
    oldest, _ = check_ages(run, max_age=1)
    assert oldest == 1  # a factor of 2 leaves no step without tokens of the policy before
    for example in run.examples:
        old = np.asarray(example.old_per_token_logps)
        mask = np.asarray(example.completion_mask).astype(bool)
        assert (old[mask] < 0).all()
        assert not old[np.asarray(example.token_versions) < 0].any()
    if mode == "retract":  # else later tokens see keys of older weights
        check_logprobs(run)


@pytest.mark.slow
def test_dropped_groups_are_on_policy_and_not_asked_again():
    run = Run(OverSampling(factor=1.5, unfinished="drop")).train()
    assert check_ages(run, max_age=0) == (0, False)
    assert len(set(run.rewarded)) == len(run.rewarded) == PROMPTS_PER_STEP * (NUM_PROMPTS // 3)
    assert all(example.old_per_token_logps is None for example in run.examples)


@pytest.mark.slow
def test_aborted_groups_are_asked_again_and_on_policy():
    run = Run(OverSampling(factor=2.0, unfinished="abort")).train()
    assert sorted(map(str, run.rewarded)) == all_prompts()
    assert run.cluster.global_steps == NUM_PROMPTS // PROMPTS_PER_STEP
    assert check_ages(run, max_age=0) == (0, False)
    assert all(example.old_per_token_logps is None for example in run.examples)
    assert sum(run.metrics["over_sampling/aborted_groups"]) > 0
    assert sum(run.metrics["over_sampling/dropped_groups"]) == 0


def test_groups_with_known_rewards_end_early_without_advantage():
    def known_rewards(prompts, completions, finished, **_):
        """Every second prompt is decided after a few tokens."""
        assert len(prompts) == len(completions) == len(finished) == NUM_GENERATIONS
        is_known = int(prompts[0].split()[0]) % 2 == 0
        return [0.5 if is_known and len(text.split()) > 2 else None for text in completions]

    run = Run(OverSampling(factor=1.5, known_rewards=known_rewards))
    run.train()
    assert sorted(map(str, run.rewarded)) == all_prompts()
    num_ended, others = 0, []
    for example in run.examples:
        is_real = np.asarray(example.token_versions) >= 0
        advantages = np.asarray(example.advantages)
        for first in range(0, len(is_real), NUM_GENERATIONS):
            group = slice(first, first + NUM_GENERATIONS)
            if np.asarray(example.prompt_ids)[first][np.asarray(example.prompt_mask)[first]][0] % 2:
                others.append(np.abs(advantages[group]).max())
            elif not advantages[group].any():
                num_ended += 1
                assert is_real[group].sum(-1).min() < 24
    assert num_ended == sum(run.metrics["over_sampling/ended_groups"]) > 0
    assert max(others) > 0


@pytest.mark.parametrize("given", [[1.0], None])
def test_known_rewards_that_are_none_or_too_few_are_an_error(given):
    def known(**_):
        return given

    run = Run(OverSampling(known_rewards=known))
    with pytest.raises(InvalidConfigError, match="function known must return 4 numbers or None"):
        run.train()


@pytest.mark.slow
def test_without_more_groups_it_is_tunix_learner():
    run = Run(OverSampling(factor=1.0, unfinished="drop")).train()
    assert [str(prompt) for prompt in run.rewarded] == [
        str(prompt) for batch in make_data() for prompt in batch["prompts"]
    ]
    assert check_ages(run, max_age=0) == (0, False)


@pytest.mark.parametrize(
    ("num_steps", "seed", "unfinished"),
    [
        pytest.param(6, 1, "carry", marks=pytest.mark.slow),
        pytest.param(200, 2, "carry", marks=pytest.mark.soak),
        pytest.param(200, 3, "abort", marks=pytest.mark.soak),
        pytest.param(200, 4, "drop", marks=pytest.mark.soak),
    ],
)
def test_two_meshes_with_micro_batches_and_evaluation(num_steps, seed, unfinished):
    """A step and an evaluation need the engine at once, under random yields at each lock."""
    script = "tests.adapter.over_sampled_on_two_meshes"
    run_python("-m", script, num_steps, seed, unfinished, num_devices=2, limit_s=2 * LIMIT_S)


def test_a_failure_in_a_reward_leaves_the_engine_free():
    run = Run(OverSampling(factor=2.0))
    run.error = ValueError("no reward")
    with pytest.raises(ValueError, match="no reward"):
        run.train()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"weight_update_mode": "wait"}}, "weight_update_mode is"),
        ({"options": {"weight_update_mode": "abort"}}, "weight_update_mode is"),
        ({"options": {"logprobs_mode": "trainer_match"}}, "trainer_match"),
        ({"options": {"logprobs_mode": "raw_logprobs"}}, "raw_logprobs"),
        ({"offload_to_cpu": True}, "offload_to_cpu"),
        ({"grpo": grpo_config(policy_loss_fn="ppo")}, "policy_loss_fn"),
        ({"grpo": grpo_config(advantage_estimator="gae")}, "advantage_estimator"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(changes, message):
    with pytest.raises(InvalidConfigError, match=message):
        Run(OverSampling(known_rewards=lambda **_: [None]), **changes)
