"""Measuring rollout speed: request lists, models of random weights, what is compared."""
