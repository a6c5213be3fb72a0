"""Tunix's agentic learner with our options, in real steps: what is trained on, and no deadlock."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import Future

import numpy as np
import pytest
from flax import nnx
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

from sgljax_engine import InvalidConfigError
from sgljax_engine.core import commands as cmd
from sgljax_engine.io_struct import PauseGenerationReqInput
from tests import inside, tunix_releases
from tests import tunix_reference as ref
from tests.adapter.agentic_parts import (
    GROUP,
    OFTEN,
    PER_STEP,
    RESPONSE,
    LineParser,
    Parser,
    SnapshotRollout,
    Turns,
    make_cluster,
    make_learner,
    prompts_of,
    train,
)
from tests.adapter.grpo_parts import MODEL, TEMPERATURE
from tests.threads import LIMIT_S
from tunix_sgljax.in_flight.agentic import VersionedTrainExample

NO_PAD = -1  # for one sequence, which needs no padding
NO_END = 63  # of the vocabulary, but so rare that completions are long

# Warnings of Tunix itself and of what it uses, while it trains.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class InterruptedRollout(SnapshotRollout):
    """Makes sure that the first update comes while the second step's episodes are in flight.

    Their calls wait until that update begins, and the update until they have some tokens. Under
    Tunix's own lock the update would wait for the episodes: a deadlock. The engine pauses itself
    after the step that brings the tokens: whatever asked it to from outside might come too late.
    """

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self._updating = threading.Event()
        self._paused = Future()
        self._core = inside.core(self.engine)
        self._step, self._core.step = self._core.step, self._step_and_pause

    def generate(self, prompts, rollout_config, **kwargs):
        (prompt,) = [prompts] if isinstance(prompts, str) else prompts  # 0.1.7 passes it bare
        if prompt in prompts_of(1):
            assert self._updating.wait(LIMIT_S)
        # Tunix drops episodes that reach the response budget.
        config = dataclasses.replace(rollout_config, max_tokens_to_generate=RESPONSE - 8)
        return super().generate(prompts, config, **kwargs)

    def update_params(self, params, filter_types=None):
        if self._updating.is_set():
            super().update_params(params, filter_types)
            return
        self._pause_at = self._core.counters.num_decode_rows + 2 * PER_STEP * GROUP
        self._updating.set()
        self._paused.result(LIMIT_S)
        try:
            super().update_params(params, filter_types)
        finally:
            self.engine.continue_generation()

    def _step_and_pause(self):
        self._step()
        is_due = self._updating.is_set() and self._core.counters.num_decode_rows >= self._pause_at
        if is_due and not self._paused.done():
            pause = PauseGenerationReqInput(mode="in_place")
            inside.submit(self.engine, cmd.Pause(pause, self._paused))


@pytest.fixture
def closing():
    """Closes the rollouts that are put into it."""
    rollouts = []
    yield rollouts
    for rollout in rollouts:
        rollout.close()


def rows_of(cluster):
    """Every trained sequence: prompt, completion, mask, versions, old log-probs, policy version."""
    for example in cluster.examples:
        assert isinstance(example, VersionedTrainExample)
        fields = {
            name: np.asarray(getattr(example, name))
            for name in (
                "prompt_ids",
                "completion_ids",
                "completion_mask",
                "token_versions",
                "old_per_token_logps",
                "policy_version",
            )
        }
        num_rows = PER_STEP * GROUP
        assert {name: len(array) for name, array in fields.items()} == dict.fromkeys(
            fields, num_rows
        )
        assert fields["token_versions"].shape == (num_rows, RESPONSE)
        assert fields["token_versions"].dtype == np.int32
        for row in range(num_rows):
            yield {name: array[row] for name, array in fields.items()}


def real_tokens(row):
    """Where the completion has tokens, among them pad tokens that were sampled."""
    is_token = row["completion_mask"].astype(bool) | (row["completion_ids"] != ref.PAD_ID)
    return np.arange(RESPONSE) < RESPONSE - is_token[::-1].argmax()


def assert_log_probs_are_those_of(snapshots, row):
    """Each token has the log-prob under the weights whose version it carries."""
    prompt = row["prompt_ids"][row["prompt_ids"] != ref.PAD_ID]
    is_real = real_tokens(row)
    completion, versions = row["completion_ids"][is_real], row["token_versions"][is_real]
    model = ref.make_tunix_qwen3(MODEL)
    for version in set(versions.tolist()) - {-1}:
        nnx.update(model, snapshots[version])
        (logps,) = ref.trainer_logps(
            model, [prompt], [completion], pad_id=NO_PAD, temperature=TEMPERATURE
        )
        np.testing.assert_allclose(
            row["old_per_token_logps"][is_real][versions == version],
            logps[versions == version],
            atol=1e-4,
            rtol=0,
        )


# ------------------------------------------------------------------ in flight


@pytest.mark.soak
def test_mixed_policies_reach_the_loss_token_by_token(closing):
    cluster = make_cluster(num_steps=3, rollout=InterruptedRollout, in_consumer=True, eos=NO_END)
    rollout = cluster.rollout
    closing.append(rollout)
    train(make_learner(cluster), 3)

    assert rollout.weight_version == cluster.global_steps == 3
    rows = list(rows_of(cluster))
    assert len(rows) == 3 * PER_STEP * GROUP
    num_mixed = 0
    for row in rows:
        mask, versions = row["completion_mask"].astype(bool), row["token_versions"]
        assert mask.any()
        assert ((versions >= 0) == mask).all()
        sampled = versions[mask]
        assert (np.diff(sampled) >= 0).all()
        assert row["policy_version"] == sampled[0]
        num_mixed += len(set(sampled.tolist())) > 1
        assert_log_probs_are_those_of(rollout.snapshots, row)
    assert num_mixed > 0
    assert max(cluster.metrics["weight_lag/mixed_fraction"]) > 0
    assert max(cluster.metrics["weight_lag/max"]) >= 1
    assert set(cluster.metrics["weight_lag/masked_fraction"]) == {0.0}


@pytest.mark.slow
def test_tokens_that_are_too_old_are_masked(closing):
    cluster = make_cluster(num_steps=3, rollout=InterruptedRollout, in_consumer=False, eos=NO_END)
    closing.append(cluster.rollout)
    train(make_learner(cluster, max_token_lag=0), 3)
    num_masked = 0
    for step, example in enumerate(cluster.examples):
        versions = np.asarray(example.token_versions)
        mask = np.asarray(example.completion_mask).astype(bool)
        assert (mask == (versions >= step)).all()
        num_masked += int(((versions >= 0) & ~mask).sum())
    assert num_masked > 0
    assert max(cluster.metrics["weight_lag/masked_fraction"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("parser", [Parser, LineParser])
def test_environment_tokens_have_no_version(closing, parser):
    """Several turns: the environment's tokens are among the assistant's, and the parser's."""
    if parser is LineParser and not tunix_releases.PARSER_ADDS_END_TOKENS:
        pytest.skip("this release of Tunix trains on the sampled tokens alone")
    cluster = make_cluster(num_steps=2, training={"max_steps": 2}, eos=OFTEN)
    closing.append(cluster.rollout)
    learner = make_learner(cluster, env_class=Turns, parser=parser(OFTEN))
    train(learner, 2)
    num_interleaved = 0
    for row in rows_of(cluster):
        mask, versions = row["completion_mask"].astype(bool), row["token_versions"]
        assert ((versions >= 0) == mask).all()
        is_real = real_tokens(row)
        num_interleaved += bool((is_real & ~mask).any())
        assert_log_probs_are_those_of(cluster.rollout.snapshots, row)
    assert num_interleaved > 0


# ------------------------------------------------------------------ draining


@pytest.mark.soak
def test_drained_updates_leave_sequences_to_one_policy(closing):
    cluster = make_cluster(num_steps=3)
    closing.append(cluster.rollout)
    train(make_learner(cluster, weight_updates="drain"), 3)
    for row in rows_of(cluster):
        sampled = set(row["token_versions"].tolist()) - {-1}
        assert sampled <= {int(row["policy_version"])}
    assert set(cluster.metrics["weight_lag/mixed_fraction"]) == {0.0}


# ------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"weight_updates": "wait"}, r"weight_updates.*'in_flight'.*'wait'"),
        ({"max_token_lag": -1}, r"max_token_lag.*-1"),
        ({"max_token_lag": 0.5}, r"max_token_lag.*0\.5"),
        ({"config": {"use_rollout_logps": False}}, r"use_rollout_logps"),
    ],
)
def test_bad_options_are_refused(untrained, options, match):
    with pytest.raises(InvalidConfigError, match=match):
        make_learner(untrained, **options)


def test_aborted_completions_are_not_trained_on(closing):
    cluster = make_cluster(num_steps=1, weight_update_mode="abort")
    closing.append(cluster.rollout)
    with pytest.raises(InvalidConfigError, match=r"weight_update_mode.*'abort'"):
        make_learner(cluster)
    make_learner(cluster, weight_updates="drain")


def test_packing_and_masking_are_not_combined(closing):
    cluster = make_cluster(num_steps=1, training={"max_seq_token_per_tpu": 256})
    closing.append(cluster.rollout)
    with pytest.raises(InvalidConfigError, match=r"max_token_lag=2.*max_seq_token_per_tpu"):
        make_learner(cluster, max_token_lag=2)


def test_another_rollout_is_refused(untrained, monkeypatch):
    monkeypatch.setattr(untrained, "_rollout", VanillaRollout.__new__(VanillaRollout))
    with pytest.raises(InvalidConfigError, match=r"SglJaxRollout.*VanillaRollout"):
        make_learner(untrained)
