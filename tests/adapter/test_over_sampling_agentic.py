"""Over-sampling of Tunix's agentic learner: groups in work, their ages, and what is refused."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
import pytest
from tunix.rl.agentic.agentic_grpo_learner import GRPOConfig

from sgljax_engine import InvalidConfigError
from tests.adapter.agentic_parts import (
    GROUP,
    PER_STEP,
    Parser,
    batches,
    make_cluster,
    prompts_of,
    reward,
)
from tests.adapter.helpers import text_of
from tests.threads import LIMIT_S, start
from tunix_sgljax import OverSampling, OverSamplingAgenticGrpoLearner

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix


def make_learner(cluster, over_sampling=None, *, config=None, **options):
    fields: dict[str, Any] = {
        "num_generations": GROUP,
        "max_response_length": 48,
        "max_concurrency": 2 * PER_STEP * GROUP,
        "off_policy_steps": 1,
    }
    return OverSamplingAgenticGrpoLearner(
        cluster,
        GRPOConfig(**(fields | (config or {}))),
        [reward],
        chat_parser=Parser(),
        over_sampling=over_sampling,
        **options,
    )


@pytest.mark.parametrize(
    ("factor", "max_age"),
    [
        pytest.param(1.5, 1, marks=pytest.mark.slow),
        pytest.param(2.0, 2, marks=pytest.mark.soak),
    ],
)
def test_every_group_is_trained_once_and_ages_are_bounded(factor, max_age):
    num_steps = 5
    cluster = make_cluster(num_steps=100)
    learner = make_learner(cluster, OverSampling(factor=factor, max_age=max_age))
    try:
        start(lambda: learner.train(batches(num_steps))).result(LIMIT_S)
    finally:
        cluster.rollout.close()
    assert cluster.global_steps == num_steps
    trained = []
    for step, example in enumerate(cluster.examples):
        versions = np.asarray(example.token_versions)
        # Tunix drops the tokens of episodes that reach the response's limit.
        assert step - versions[versions >= 0].min(initial=step) <= max_age
        for ids in np.asarray(example.prompt_ids)[::GROUP]:
            trained.append(text_of(ids[ids != 0]))
    wanted = [prompt for step in range(num_steps) for prompt in prompts_of(step)]
    assert sorted(trained) == sorted(wanted)
    carried = cluster.metrics["over_sampling/carried_groups"]
    assert max(carried) == round((factor - 1) * PER_STEP)


@pytest.mark.slow
def test_it_stops_at_the_last_step():
    cluster = make_cluster(num_steps=2)
    learner = make_learner(cluster, OverSampling(factor=1.5))
    try:
        start(lambda: learner.train(batches(5))).result(LIMIT_S)
    finally:
        cluster.rollout.close()
    assert cluster.global_steps == 2


@contextlib.contextmanager
def refused(cluster, message):
    """The learner is refused, and leaves no thread behind and the cluster as it was."""
    threads, cluster.global_steps = set(threading.enumerate()), 7
    with pytest.raises(InvalidConfigError, match=message):
        yield
    assert set(threading.enumerate()) <= threads
    assert cluster.global_steps == 7
    assert not cluster.actor_trainer.is_managed_externally


@pytest.mark.parametrize(
    ("over_sampling", "changes", "message"),
    [
        ({"unfinished": "drop"}, {}, r"unfinished='carry'\), got 'drop'"),
        ({"unfinished": "abort"}, {}, "got 'abort'"),
        ({"known_rewards": len}, {}, "known_rewards=None"),
        ({}, {"weight_updates": "drain"}, "weight_updates='in_flight', got 'drain'"),
        ({}, {"config": {"off_policy_steps": 0}}, "off_policy_steps >= 1, got 0"),
    ],
)
def test_what_tunix_makes_impossible_is_refused_by_name(untrained, over_sampling, changes, message):
    with refused(untrained, message):
        make_learner(untrained, OverSampling(**over_sampling), **changes)


def test_examples_that_are_made_too_early_are_refused():
    cluster = make_cluster(num_steps=1, in_consumer=False)
    try:
        with refused(cluster, "compute_logps_micro_batch_size >= 2, got 1"):
            make_learner(cluster)
    finally:
        cluster.rollout.close()
