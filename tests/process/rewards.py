"""What reward workers do: functions that a spawned process imports without JAX."""

from __future__ import annotations


def reward(text: str) -> float:
    """A reward."""
    return float(len(text))


def take(anything: object) -> None:
    """Takes an argument."""
