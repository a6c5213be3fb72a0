"""Padding for the rectangular arrays that Tunix's learners expect."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Sequence

import numpy as np

from sgljax_engine import InvalidConfigError

logger = logging.getLogger(__name__)


def check_pad_id(pad_id: int | None, eos_id: int | None) -> None:
    """Warns about a tokenizer whose pad and end tokens are the same.

    Raises:
        InvalidConfigError: for a tokenizer that has neither, so that padding is impossible.
    """
    if pad_id != eos_id:
        return
    if pad_id is None or pad_id < 0:
        raise InvalidConfigError(
            f"the tokenizer's pad and end tokens are both {pad_id}, which is no token; Tunix pads "
            "prompts and completions, so name a pad token"
        )
    logger.warning(
        "the tokenizer's pad and end tokens are both %d: completions end before it, as those of "
        "Tunix's vanilla sampler do, and Tunix's masks hide every %d inside a prompt from the "
        "trainer; see docs/tunix.md",
        pad_id,
        pad_id,
    )


def left_pad_prompts(
    prompts: Sequence[Sequence[int]], max_prompt_length: int, pad_id: int
) -> np.ndarray:
    """Left-padded prompts, int32 [B, P].

    P is `max_prompt_length`, so that all micro-batches have the same shape. As in Tunix's own
    samplers, a longer prompt is never cut: P then grows to the next power of two.
    """
    longest = max(len(ids) for ids in prompts)
    width = max_prompt_length
    if longest > width:
        width = 1 << (longest - 1).bit_length()
    padded = np.full((len(prompts), width), pad_id, np.int32)
    for row, ids in enumerate(prompts):
        padded[row, width - len(ids) :] = ids
    return padded


def right_pad(rows: Sequence[np.ndarray], width: int, value: float) -> np.ndarray:
    """Rows padded on the right, [B, width]; float32 for a float value, else int32."""
    dtype = np.float32 if isinstance(value, float) else np.int32
    out = np.full((len(rows), width), value, dtype)
    for row, ids in enumerate(rows):
        out[row, : len(ids)] = ids
    return out


def pad_masks(completions: Sequence[Sequence[np.ndarray]], width: int, size: int) -> np.ndarray:
    """Masks of the first `width` tokens of completions, [B, width, size] int32, padded with -1."""
    padded = np.full((len(completions), width, size), -1, np.int32)
    for row, masks in zip(padded, completions, strict=True):
        masks = masks[:width]
        row[: len(masks)] = right_pad(masks, size, -1)
    return padded


def strip_prompt(ids: Sequence[int], pad_id: int) -> list[int]:
    """A prompt's ids without the pad ids in front of it.

    In Tunix's left-padded arrays these look like padding: its masks hide them from samplers and
    trainers. Pad ids after the first other token stay.
    """
    return list(itertools.dropwhile(lambda token: token == pad_id, ids))


def unpad_prompts(prompts_BP: np.ndarray, pad_id: int) -> list[np.ndarray]:
    """The tokens of each left-padded row, from the first one that is not `pad_id`."""
    return [row[np.logical_or.accumulate(row != pad_id)] for row in prompts_BP]


def completion_mask(completions_BC: np.ndarray, pad_id: int) -> np.ndarray:
    """Mask of tokens in right-padded rows, bool [B, C]: up to the last one that is not `pad_id`."""
    reversed_BC = (completions_BC != pad_id)[:, ::-1]
    return np.logical_or.accumulate(reversed_BC, axis=1)[:, ::-1]


def num_before_end(ids: Sequence[int], pad_id: int, end_ids: Collection[int]) -> int:
    """Number of tokens of a completion, without a sampled end token that equals the pad id.

    Tunix could not distinguish such a token from padding. Other end tokens count.
    """
    has_hidden_end = len(ids) > 0 and ids[-1] == pad_id and pad_id in end_ids
    return len(ids) - has_hidden_end


def spread(values: Sequence[np.ndarray], mask_BL: np.ndarray) -> np.ndarray:
    """Puts each row's values where its mask is true, and 0 elsewhere. Float32 [B, L]."""
    out = np.zeros(mask_BL.shape, np.float32)
    for row, row_values in enumerate(values):
        out[row, mask_BL[row]] = row_values
    return out
