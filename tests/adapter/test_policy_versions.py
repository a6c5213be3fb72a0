"""From an engine's weight versions to a learner's policies, and the locks around syncs."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from tunix.rl.agentic.agents.agent_types import Step

from sgljax_engine import InvalidRequestError
from tests.threads import LIMIT_S, start
from tunix_sgljax.in_flight.outputs import VersionedRolloutOutput
from tunix_sgljax.in_flight.policy_versions import (
    NO_VERSION,
    AnnouncedSyncLock,
    PolicyVersions,
)
from tunix_sgljax.in_flight.trajectories import token_versions


def translated(versions, *engine_versions):
    result = versions.translate(np.array(engine_versions, np.int32))
    assert result.dtype == np.int32
    return result.tolist()


def test_versions_start_where_engine_and_learner_stand():
    versions = PolicyVersions(engine_version=3, policy_version=10)
    assert translated(versions, 3, NO_VERSION, 3) == [10, NO_VERSION, 10]
    versions.announce(4, 11)
    assert translated(versions, 3, 4, NO_VERSION) == [10, 11, NO_VERSION]
    assert translated(versions) == []


def test_versions_that_no_sync_announced_belong_to_the_sync_before():
    """With `offload_to_cpu` Tunix hands the weights over more than once a step."""
    versions = PolicyVersions(0, 0)
    versions.announce(3, 1)
    versions.announce(6, 2)
    assert translated(versions, 0, 1, 2, 3, 4, 5, 6, 7) == [0, 0, 0, 1, 1, 1, 2, 2]


def test_a_sync_that_failed_may_be_announced_again():
    versions = PolicyVersions(0, 5)
    versions.announce(1, 6)
    versions.announce(1, 6)
    versions.announce(2, 7)
    assert translated(versions, 0, 1, 2) == [5, 6, 7]


def test_in_flight_lock_holds_only_syncs_apart():
    lock = AnnouncedSyncLock(lambda: None, is_in_flight=True)
    lock.acquire_rollout()
    lock.acquire_weight_sync()
    lock.acquire_rollout()  # Tunix's own would block the asyncio loop here, for ever
    reached = threading.Event()

    def sync():
        reached.set()
        lock.acquire_weight_sync()
        lock.release_weight_sync()

    other = start(sync)
    assert reached.wait(LIMIT_S)
    assert not other.done()
    lock.release_weight_sync()
    other.result(LIMIT_S)
    lock.release_rollout()


def test_announced_lock_is_the_inner_one_with_a_call():
    announced = []
    announce = lambda: announced.append(len(announced))  # noqa: E731
    lock = AnnouncedSyncLock(announce, is_in_flight=False)
    lock.acquire_rollout()
    sync = start(lock.acquire_weight_sync)
    assert announced == []  # drained first
    lock.release_rollout()
    sync.result(LIMIT_S)
    assert announced == [0]
    lock.release_weight_sync()
    lock.acquire_rollout()
    lock.release_rollout()
    assert announced == [0]


def output(tokens, versions):
    return VersionedRolloutOutput(
        text=[""],
        logits=[],
        tokens=[np.array(tokens, np.int32)],
        left_padded_prompt_tokens=np.zeros((1, 1), np.int32),
        logprobs=None,
        weight_versions=[np.array(versions, np.int32)],
    )


def test_versions_follow_the_steps_of_a_conversation():
    calls = [output([5, 5, 6], [0, 0, 1]), output([], []), output([5, 5, 6], [2, 2, 2])]
    dropped = output([9], [3])  # the response budget was used up: Tunix made no step of it
    late = output([9], [1])
    steps = [
        Step(assistant_tokens=calls[0].tokens[0], env_tokens=np.array([7, 7])),
        Step(assistant_tokens=calls[1].tokens[0], env_tokens=np.array([8])),
        Step(),  # the environment timed out
        Step(assistant_tokens=calls[2].tokens[0]),
    ]
    got = token_versions(steps, dict(enumerate([calls[0], calls[1], late, calls[2], dropped])))
    assert got.dtype == np.int32
    assert got.tolist() == [0, 0, 1, -1, -1, -1, 2, 2, 2]
    assert token_versions([], {0: dropped}).tolist() == []


def test_what_a_parser_puts_behind_an_answer_has_no_version():
    """Newer releases of Tunix hand the tokens to the chat parser, which makes an array of its own.

    Two answers are alike, so their tokens do not tell which call they are of.
    """
    calls = {0: output([5, 6], [0, 1]), 1: output([5, 6], [2, 2])}
    steps = [
        Step(assistant_tokens=np.array([5, 6, 7]), env_tokens=np.array([8])),
        Step(assistant_tokens=np.array([5, 6, 7])),
    ]
    assert token_versions(steps, calls).tolist() == [0, 1, -1, -1, 2, 2, -1]


@pytest.mark.parametrize("tokens", [[4, 6], [5], []])
def test_tokens_that_no_call_returned_are_refused(tokens):
    step = Step(assistant_tokens=np.array(tokens, np.int32))
    with pytest.raises(InvalidRequestError, match=r"step 0 of a trajectory.*one step for each"):
        token_versions([step], {0: output([5, 6], [0, 0])})
    with pytest.raises(InvalidRequestError, match="step 0"):
        token_versions([step], {1: output(tokens, [0] * len(tokens))})
