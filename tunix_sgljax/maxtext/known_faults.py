"""Faults of MaxText that change what its trainer computes, so that reports can name them."""

from __future__ import annotations

from typing import Any

_HYBRIDS = ("qwen3_next", "qwen3_5")
"""Decoder blocks with gated delta nets."""


def padding_fault(config: Any) -> str | None:
    """Why a MaxText model's log-probs depend on the padding in front of a prompt, if they do.

    Args:
        config: MaxText's config.

    Returns:
        A clause that names the fault, seen in MaxText 0.2.5; None for a model without it.
    """
    block = getattr(config, "decoder_block", None)
    if getattr(block, "value", block) not in _HYBRIDS:
        return None
    return (
        "MaxText masks padding only behind the convolution of its gated delta nets, so pad tokens "
        "reach the first tokens of a prompt in every such layer (docs/maxtext.md)"
    )


def padding_fault_of(model: Any) -> str | None:
    """The same for an actor, which has such a config if it is MaxText's adapter."""
    return padding_fault(getattr(getattr(model, "base", None), "config", None))
