"""Finds, on the device itself, which widths of token tiles give a token the same bits.

Within one width, a token's bits depend on nothing else, by construction: every tile goes through
the same compiled loop body (`layers.tiles`), and attention sums in a fixed order
(`attention.batch_invariant`). One width for everything would be slow for few tokens, or for many.
So before an engine starts, it runs the same tokens through one layer of the model in tiles of each
width, and uses only widths whose logits have the bits of `SMALL_BATCH`. These are all widths if
matrix products of every width sum in the same order, as in XLA's CPU library they mostly do.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from sgljax_engine.attention.base import AttentionOptions
from sgljax_engine.errors import InvalidConfigError
from sgljax_engine.layers.basic import SMALL_BATCH
from sgljax_engine.layers.tiles import tokens_in_tiles
from sgljax_engine.models.spec import LayerCache, ModelContext, ModelDefinition, Params
from sgljax_engine.xla_options import compiler_options

logger = logging.getLogger(__name__)

CANDIDATES = (16, SMALL_BATCH, 128, 256)
"""Widths to try, ascending."""

_NUM_TOKENS = 2 * CANDIDATES[-1]
_ONE_LAYER = "model.layers.0."


def agreeing_widths(
    model: ModelDefinition, context: ModelContext, weights: Mapping[str, jax.Array], platform: str
) -> tuple[int, ...]:
    """The candidates that round like `SMALL_BATCH`, itself included, ascending. Any thread.

    Args:
        model: The architecture.
        context: The model's context; `tile_widths` is ignored.
        weights: Physical weights.
        platform: JAX's name for the kind of device.

    Raises:
        InvalidConfigError: when a token's bits depend on its place even within one width.
    """
    rng = np.random.default_rng(0)
    ids = rng.integers(0, context.config.vocab_size, _NUM_TOKENS, dtype=np.int32)
    positions = rng.integers(0, context.config.context_length, _NUM_TOKENS, dtype=np.int32)
    used = {
        name: weight
        for name, weight in weights.items()
        if name.startswith(_ONE_LAYER) or not name.startswith("model.layers.")
    }
    order = rng.permutation(_NUM_TOKENS)

    # One function for both orders of a width, so that each width is compiled once.
    run = jax.jit(_one_layer, static_argnums=(0, 1), compiler_options=compiler_options(platform))

    def logits(width: int, order: np.ndarray) -> np.ndarray:
        tiled = context._replace(tile_widths=(width,))
        args = (used, ids[order], positions[order], np.int32(_NUM_TOKENS))
        out = np.empty((_NUM_TOKENS, context.config.vocab_size), np.float32)
        out[order] = jax.device_get(run(model, tiled, *args))
        return out.view(np.uint32)

    expected = logits(SMALL_BATCH, np.arange(_NUM_TOKENS))
    if not np.array_equal(logits(SMALL_BATCH, order), expected):
        raise InvalidConfigError(
            "enable_deterministic_sampling cannot be kept here: on this device the bits of a token "
            "depend on its place in the batch"
        )
    agreeing = tuple(
        width
        for width in CANDIDATES
        if width == SMALL_BATCH or np.array_equal(logits(width, order), expected)
    )
    logger.info("tokens have the same bits in tiles of %s, of %s tried", agreeing, CANDIDATES)
    return agreeing


def _one_layer(
    model: ModelDefinition,
    context: ModelContext,
    weights: Params,
    ids: jax.Array,
    positions: jax.Array,
    num_tokens: jax.Array,
) -> jax.Array:
    """Logits [T, V] of a one-layer model in which each token sees only itself."""
    config = context.config
    attention = dataclasses.replace(config.attention, sliding_layers=())
    context = context._replace(
        config=dataclasses.replace(config, num_layers=1, attention=attention)
    )
    group = config.num_heads // config.num_kv_heads

    def attend(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        _: LayerCache | None,
        options: AttentionOptions,
    ) -> tuple[jax.Array, LayerCache | None]:
        del options
        # Meaningless values, but bits of each input reach the output.
        return jnp.repeat(v, group, axis=1) + 0.125 * q * jnp.repeat(k, group, axis=1), None

    tokens = tokens_in_tiles(context.tile_widths, ids.shape[0], num_tokens)
    logits, _ = model.token_logits(weights, context, ids, positions, attend, None, tokens)
    return logits
