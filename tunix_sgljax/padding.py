"""The rectangular arrays that Tunix's learners expect around a rollout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def left_pad_prompts(
    prompts: Sequence[Sequence[int]], max_prompt_length: int, pad_id: int
) -> np.ndarray:
    """Left-padded prompts, int32 [B, P].

    P is `max_prompt_length`, so that all micro-batches have the same shape. As in Tunix's own
    samplers a longer prompt is never cut: P then grows to the next power of two.
    """
    longest = max(len(ids) for ids in prompts)
    width = max_prompt_length
    if longest > width:
        width = 1 << (longest - 1).bit_length()
    padded = np.full((len(prompts), width), pad_id, np.int32)
    for row, ids in enumerate(prompts):
        padded[row, width - len(ids) :] = ids
    return padded


def right_pad(rows: Sequence[np.ndarray], width: int, value: int) -> np.ndarray:
    """Rows padded on the right, int32 [B, width]."""
    out = np.full((len(rows), width), value, np.int32)
    for row, ids in enumerate(rows):
        out[row, : len(ids)] = ids
    return out


def unpad(tokens_BL: np.ndarray, pad_id: int) -> list[np.ndarray]:
    """The tokens of each row that are not `pad_id`, in order."""
    return [row[row != pad_id] for row in tokens_BL]


def spread(values: Sequence[np.ndarray], mask_BL: np.ndarray) -> np.ndarray:
    """Puts each row's values where its mask is true; 0 elsewhere. Float32 [B, L]."""
    out = np.zeros(mask_BL.shape, np.float32)
    for row, row_values in enumerate(values):
        out[row, mask_BL[row]] = row_values
    return out
