"""Fixtures of the fleet's tests: the adapter's models and rollouts."""

from tests.adapter.conftest import make_rollout, model, other_model

__all__ = ["make_rollout", "model", "other_model"]
