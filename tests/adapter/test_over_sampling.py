"""Over-sampling: steps that end before their longest answers, and groups that go on."""

from __future__ import annotations

import collections
import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tunix.rl.rl_cluster import Mode
from tunix.rl.rl_cluster import RLCluster as TunixRLCluster

from sgljax_engine import EngineShutdownError, InvalidConfigError
from sgljax_engine.core import commands as cmd
from tests import inside
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
from tests.threads import LIMIT_S, gate_steps, start, take_steps, wait_for
from tunix_sgljax import OverSampling, OverSamplingGrpoLearner, SglJaxRollout

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix

NUM_PROMPTS = 12


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

    # No sample ends by itself, and no step is taken before the known groups of the last one ended.
    config = rollout_config(max_tokens_to_generate=24, max_prompt_length=16, eos_tokens=[])
    over_sampling = OverSampling(factor=1.5, known_rewards=known_rewards)
    run = Run(over_sampling, rollout_config=config)
    engine = gate_steps(run.cluster.rollout.engine)
    scheduler = inside.core(engine).scheduler

    def known_have_ended():
        lengths = collections.defaultdict(list)
        for request in scheduler.requests():
            lengths[request.prompt_ids[0]].append(len(request.output_ids))
        return not any(first % 2 == 0 and min(each) > 4 for first, each in lengths.items())

    call = start(run.train)
    with contextlib.suppress(EngineShutdownError):  # at the end of the training
        while not call.done():
            take_steps(engine)
            wait_for(lambda: inside.ask(engine, functools.partial(cmd.Run, known_have_ended)))
    call.result(LIMIT_S)
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
