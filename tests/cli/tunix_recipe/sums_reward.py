"""Rewards for the recipe of the tests; Tunix takes every function of the module."""

from __future__ import annotations


def digits(prompts, completions, answer, **_):
    """Something that samples differ in: their share of digits."""
    assert len(prompts) == len(completions) == len(answer)
    return [sum(char.isdigit() for char in text) / (len(text) or 1) for text in completions]
