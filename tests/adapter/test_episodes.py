"""Episodes that fail: the training ends with that error, or goes on without the group."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tunix.rl.agentic.agents.model_agent import ModelAgent

from sgljax_engine import InvalidConfigError, InvalidRequestError
from tests.adapter.agentic_parts import (
    GROUP,
    PER_STEP,
    LineParser,
    Turns,
    batches,
    make_cluster,
    make_learner,
)
from tests.adapter.helpers import text_of
from tests.threads import LIMIT_S, start
from tests.tiers import tiered
from tunix_sgljax import SglJaxRollout
from tunix_sgljax.in_flight.episodes import describe_difference

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix

NUM_STEPS = 3


class OddError(BaseException):
    """Neither an Exception nor anything that Python knows."""


ERRORS: list[type[BaseException]] = [
    ValueError,
    SystemExit,
    KeyboardInterrupt,
    asyncio.CancelledError,
    StopIteration,
    OddError,
]

WHERE = ("init", "reset", "step", "close", "final_reward", "agent")


class Failing(Turns):
    """Fails in one place, in one episode of the second group."""

    def __init__(self, single_example, *, where, error, **names):
        self._where, self._error = where, error
        self._is_bad = (names["group_id"], names["pair_index"]) == (1, 2)
        self._fail("init")
        super().__init__(single_example, **names)
        self.final_reward_fn = self._final_reward

    def _fail(self, where):
        if self._is_bad and where == self._where:
            raise self._error("mine")

    def _initial_observation(self):
        self._fail("reset")
        return super()._initial_observation()

    def _step_impl(self, action):
        self._fail("step")
        return super()._step_impl(action)

    def _final_reward(self):
        self._fail("final_reward")
        return 0.0

    def close(self):
        self._fail("close")
        super().close()


class FailingAgent(ModelAgent):
    """Fails at the first answer of an environment that is bad."""

    def __init__(self, *, error, **options):
        super().__init__(**options)
        self._bad_error = error

    def update_from_model(self, response, **options):
        if not FailingAgent.has_failed.is_set():
            FailingAgent.has_failed.set()
            raise self._bad_error("mine")
        return super().update_from_model(response, **options)

    has_failed = threading.Event()


class BriefRollout(SglJaxRollout):
    """Leaves something of the response's budget, so that each episode has a second turn."""

    def generate(self, prompts, rollout_config, **kwargs):
        config = dataclasses.replace(rollout_config, max_tokens_to_generate=8)
        return super().generate(prompts, config, **kwargs)


@pytest.fixture(scope="module")
def make_trained():
    """Trains a learner of one cluster, whose trainer does nothing: it is not the subject."""
    cluster = make_cluster(num_steps=100, rollout=BriefRollout)

    def note(metrics, **_):
        for name, (value, _) in metrics.items():
            cluster.metrics.setdefault(name, []).append(value)

    def trained(
        where="",
        error: Any = ValueError,
        *,
        num_steps=NUM_STEPS,
        in_consumer=True,
        **options,
    ):
        training = cluster.cluster_config.training_config
        training.compute_logps_micro_batch_size = PER_STEP if in_consumer else 1
        cluster.examples.clear()
        cluster.metrics.clear()
        cluster.global_steps = 0
        cluster.buffer_metrics_async = note  # Tunix keeps those of a step for the next training
        FailingAgent.has_failed.clear()
        if where == "agent":
            options |= {"agent_class": FailingAgent, "agent_kwargs": {"error": error}}
        environment = {"env_class": Failing, "env_kwargs": {"where": where, "error": error}}
        learner = make_learner(cluster, **(environment | options))

        def update(examples, *_):
            cluster.examples.extend(examples)
            cluster.actor_trainer._train_steps += 1

        cluster.update_actor = update
        call = start(lambda: learner.train(batches(num_steps)))
        return cluster, call.exception(LIMIT_S)

    yield trained
    cluster.rollout.close()


FULL, FREE = PER_STEP * GROUP, 8 * PER_STEP * GROUP
"""A pool that a step fills, and one that is never full."""


def places(fast: Sequence[str], slow: Sequence[str]) -> list[Any]:
    """All places with both pools; those of the faster tiers with a free pool, where Tunix hangs."""
    both = [(where, pool) for where in WHERE for pool in (FULL, FREE)]
    return tiered(both, *([(where, FREE) for where in names] for names in (fast, slow)))


@pytest.mark.parametrize("place", places(["step"], ["reset", "agent"]), ids=str)
def test_the_training_ends_with_the_error(make_trained, place):
    where, concurrency = place
    for error in ERRORS:
        _, raised = make_trained(where, error, config={"max_concurrency": concurrency})
        is_odd = where == "agent" and error is StopIteration  # which no coroutine can raise
        assert type(raised) is (RuntimeError if is_odd else error), (where, error, raised)
        assert is_odd or raised.args == ("mine",)
        assert "in an episode" in raised.__notes__[-1]


@pytest.mark.parametrize("place", places([], ["step"]), ids=str)
def test_the_training_goes_on_without_the_group(make_trained, place):
    where, concurrency = place
    for error in ERRORS:
        cluster, raised = make_trained(
            where, error, config={"max_concurrency": concurrency}, failed_episodes="drop"
        )
        assert raised is None, (where, error, raised)
        assert cluster.global_steps == NUM_STEPS
        assert sum(cluster.metrics["episodes/failed_groups"]) == 1
        masks = np.concatenate([np.asarray(each.completion_mask) for each in cluster.examples])
        is_masked = ~masks.reshape(NUM_STEPS * PER_STEP, GROUP, -1).any(axis=(1, 2))
        assert is_masked.sum() == 1


def test_training_ends_where_all_groups_fail(make_trained):
    class Broken(Turns):
        def _step_impl(self, action):
            raise ValueError("mine")

    cluster, raised = make_trained(failed_episodes="drop", env_class=Broken, env_kwargs={})
    assert repr(raised) == "ValueError('mine')"
    assert not cluster.examples


@pytest.mark.parametrize(
    "in_consumer", tiered([True, False], [], [True]), ids=["consumer", "producer"]
)
def test_reward_functions_may_raise_anything(make_trained, in_consumer):
    for error in ERRORS:

        def my_reward(prompts, completions, error=error, **_):
            raise error("mine")

        _, raised = make_trained(rewards=[my_reward], in_consumer=in_consumer)
        assert type(raised) in (error, RuntimeError)  # StopIteration ends a generator of Tunix
        assert "mine" in repr(raised) or "StopIteration" in repr(raised)


def test_a_refused_prompt_ends_the_training_or_drops_the_group(make_trained):
    class LongStart(Turns):
        """The first prompt of a group is longer than Tunix's arrays."""

        def _initial_observation(self):
            task = super()._initial_observation()
            if self.extra_kwargs["group_id"] == 1:
                task = {**task, "prompts": np.array([text_of([5] * 9)])}
            return task

    options: dict[str, Any] = {"env_class": LongStart, "env_kwargs": {}}
    _, raised = make_trained(**options)
    assert isinstance(raised, InvalidRequestError)
    assert "has 9 tokens, more than RolloutConfig.max_prompt_length=8" in str(raised)
    cluster, raised = make_trained(failed_episodes="drop", **options)
    assert raised is None
    assert sum(cluster.metrics["episodes/failed_groups"]) == 1


def test_a_reset_that_never_ends_is_a_failure(make_trained):
    let_go = threading.Event()

    class Stuck(Turns):
        def _initial_observation(self):
            if self.extra_kwargs["group_id"] == 1:
                let_go.wait(LIMIT_S)
            return super()._initial_observation()

    config = {"episode_timeout": 1.0}
    try:
        _, raised = make_trained(env_class=Stuck, env_kwargs={}, config=config)
    finally:
        let_go.set()
    assert "reset took longer than episode_timeout (1.0 s)" in str(raised)


@pytest.mark.parametrize("masks", [pytest.param(False, marks=pytest.mark.slow), True])
def test_turns_that_were_tokenised_again_are_counted_warned_of_and_masked(
    make_trained, caplog, masks
):
    """The parser says a line break behind an answer, which is not in the trained tokens."""
    cluster, raised = make_trained(parser=LineParser(), mask_retokenized=masks)
    assert raised is None
    assert min(cluster.metrics["episodes/retokenized_turns"]) == 1.0
    # Of this learner, whose parser says a 6: episodes of an earlier training may end meanwhile.
    assert caplog.text.count("6, 7, 1, 9] in the prompt") == 1
    versions = np.concatenate([np.asarray(e.token_versions) for e in cluster.examples])
    masked = np.concatenate([np.asarray(e.completion_mask) == 0 for e in cluster.examples])
    is_later = np.cumsum(versions < 0, axis=-1) > 0  # behind the environment's first tokens
    assert (masked | ~is_later | (versions < 0)).all() == masks


def test_other_options_are_refused(untrained):
    with pytest.raises(InvalidConfigError, match=r"failed_episodes must be one of .* got 'keep'"):
        make_learner(untrained, failed_episodes="keep")


def test_the_first_difference_is_shown():
    text = describe_difference([1, 2, 3], [1, 4])
    assert text == ("at token 1: [2, 3] in the sequence that is trained on, [4] in the prompt")
    assert "at token 2: [] in" in describe_difference([1, 2], [1, 2, 3])
