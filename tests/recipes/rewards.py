"""Rewards of the recipes here; Tunix takes every function of this module."""

from __future__ import annotations


def characters(prompts, completions, answer=None, **_):
    """Something that samples differ in, in whole numbers as PPO needs them."""
    assert len(prompts) == len(completions)
    return [float(sum(map(ord, text)) % 7) for text in completions]
