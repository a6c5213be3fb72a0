"""Faults of MaxText that change what its trainer computes, so that reports can name them."""

from __future__ import annotations

from typing import Any

from tunix_sgljax.maxtext.fields import HYBRIDS, get, is_maxtext_config


def padding_fault(config: Any) -> str | None:
    """Why a MaxText model's log-probs depend on the padding in front of a prompt, if they do.

    Returns:
        A clause that names the fault, seen in MaxText 0.2.5; None for a model without it.
    """
    if not is_maxtext_config(config) or get(config, "decoder_block") not in HYBRIDS:
        return None
    return (
        "MaxText masks padding only behind the convolution of its gated delta nets, so pad tokens "
        "reach the first tokens of a prompt in every such layer (docs/maxtext.md)"
    )
