"""The trainer's own log-probs, and the report on those of the engine, for MaxText's actor."""

from __future__ import annotations

import jax
import pytest
from flax import nnx

from tests.maxtext import actors
from tests.recipes.models import make_tokenizer
from tunix_sgljax import SglJaxRollout, mismatch_report

pytestmark = pytest.mark.filterwarnings("ignore")

PROMPTS = ["say e, ann", "say e, bob and cem", "e", "cem"]


@pytest.fixture(scope="module")
def actor():
    return actors.make()


def test_trainer_match_leaves_no_difference(actor):
    rollout = actors.make_rollout(actor, logprobs_mode="trainer_match")
    report = mismatch_report(rollout, actor.model, PROMPTS)
    assert report.overall.num_tokens > 20
    assert report.overall.max_abs == 0.0
    rollout.close()


def test_a_missed_update_is_seen(actor):
    rollout = actors.make_rollout(actor)
    report = mismatch_report(rollout, actor.model, PROMPTS)
    assert report.is_within(), str(report)
    other = nnx.clone(actor.model)
    state = nnx.state(other, nnx.Param)
    nnx.update(other, jax.tree.map(lambda x: 1.1 * x, state))
    assert not mismatch_report(rollout, other, PROMPTS).is_within()
    rollout.update_params(nnx.state(other, nnx.Param))
    assert mismatch_report(rollout, other, PROMPTS).is_within()
    rollout.close()


def test_the_actor_tells_a_plain_rollout_all_it_needs(actor):
    rollout = SglJaxRollout(
        rollout_actor=actor.model,
        tokenizer=make_tokenizer(names_pad=True),
        rollout_config=actors.rollout_config(),
        sampling_params={"bad_token_ids": [actors.PAD_ID]},
    )
    report = mismatch_report(rollout, actor.model, PROMPTS)
    assert report.is_within(), str(report)
    rollout.close()
