"""A policy whose logits are those of the tokens that the sampler allowed.

Tunix's losses and log-probs come from a model's logits. With the logits of all other tokens at
`FORBIDDEN`, their softmax is the distribution that a token was drawn from ("Keep Sampling Mask",
DeepSeek-V3.2, arXiv 2512.02556, 3.1).

Shape legend: B sequences, L tokens of one, C of its completion, N of a mask, V vocabulary.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

FORBIDDEN = -1e9
"""Its exponential is 0 at any temperature; with -inf, Tunix's entropy would be NaN."""


def keep_masked(logits_BLV: jax.Array, masks_BCN: jax.Array) -> jax.Array:
    """Logits with `FORBIDDEN` for all tokens that are not in the mask of their position.

    Args:
        logits_BLV: Logits of whole sequences. The last C of them but the very last, and the one
            before, are those that the completion was drawn from.
        masks_BCN: int32 ids, padded with -1. A position without ids keeps all tokens.
    """
    num_rows, num_tokens, vocab_size = logits_BLV.shape
    width = masks_BCN.shape[1]
    rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None, None]
    places = jnp.arange(width, dtype=jnp.int32)[None, :, None]
    ids = jnp.where(masks_BCN < 0, vocab_size, masks_BCN)  # negative ones would count from the end
    is_kept = jnp.zeros((num_rows, width, vocab_size), bool)
    is_kept = is_kept.at[rows, places, ids].set(True, mode="drop") | (masks_BCN[:, :, :1] < 0)
    first = num_tokens - width - 1  # its logits give the first token of the completion
    drawn_from = logits_BLV[:, first : num_tokens - 1]
    drawn_from = jnp.where(is_kept, drawn_from, jnp.asarray(FORBIDDEN, logits_BLV.dtype))
    return jnp.concatenate([logits_BLV[:, :first], drawn_from, logits_BLV[:, -1:]], axis=1)


class MaskedModel(nnx.Module):
    """A Tunix model that keeps the masked logits alone. Its parameters are the model's own."""

    def __init__(self, model: nnx.Module, masks_BCN: jax.Array) -> None:
        """Takes the model and the masks of one batch; see `keep_masked`."""
        self.model = model
        self.masks = nnx.Variable(masks_BCN)

    def __call__(
        self,
        tokens: jax.Array,
        positions: Any = None,
        cache: Any = None,
        attention_mask: Any = None,
    ) -> tuple[jax.Array, Any]:
        """Calls the model as Tunix's `compute_per_token_logps` does."""
        return self._masked(tokens, positions=positions, cache=cache, attention_mask=attention_mask)

    def _masked(self, tokens: jax.Array, **given: Any) -> tuple[jax.Array, Any]:
        model: Any = self.model
        logits, cache = model(tokens, **given)
        return keep_masked(logits, self.masks.value), cache


class SegmentedMaskedModel(MaskedModel):
    """The same for models that take `segment_ids`, which Tunix looks for in the signature."""

    def __call__(
        self,
        tokens: jax.Array,
        positions: Any = None,
        cache: Any = None,
        attention_mask: Any = None,
        segment_ids: Any = None,
    ) -> tuple[jax.Array, Any]:
        """Calls the model as Tunix's `compute_per_token_logps` does."""
        return self._masked(
            tokens,
            positions=positions,
            cache=cache,
            attention_mask=attention_mask,
            segment_ids=segment_ids,
        )


def masked_model(model: nnx.Module, masks_BCN: jax.Array) -> MaskedModel:
    """The model with the logits of masks alone."""
    call: Any = model.__call__
    parameters = inspect.signature(call).parameters.values()
    takes_segments = any(
        p.name == "segment_ids" or p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters
    )
    kind = SegmentedMaskedModel if takes_segments else MaskedModel
    return kind(model, masks_BCN)
