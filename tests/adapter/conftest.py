"""Fixtures of the adapter's tests."""

from __future__ import annotations

import contextlib

import pytest

from tests import tunix_reference as ref
from tests.adapter.agentic_parts import make_cluster
from tests.adapter.helpers import MODEL, new_rollout, rollout_config


@pytest.fixture(scope="session")
def model():
    """A Tunix Qwen3 that no test may change."""
    return ref.make_tunix_qwen3(MODEL)


@pytest.fixture(scope="session")
def other_model():
    """The same shape with other weights; no test may change it either."""
    return ref.make_tunix_qwen3(MODEL, seed=1234)


@pytest.fixture
def make_rollout(model):
    """Makes rollouts of `model`, or of another one, and closes them after the test."""
    with contextlib.ExitStack() as stack:

        def make(actor=None, **arguments):
            if "config" in arguments:
                arguments["rollout_config"] = rollout_config(**arguments.pop("config"))
            rollout = new_rollout(model if actor is None else actor, **arguments)
            stack.callback(rollout.close)
            return rollout

        yield make


@pytest.fixture(scope="module")
def rollout(model):
    """A rollout of `model`, shared by a module's tests, which leave its weights alone."""
    shared = new_rollout(model)
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def untrained():
    """A cluster of an agentic learner that no test trains."""
    cluster = make_cluster(num_steps=1)
    yield cluster
    cluster.rollout.close()
