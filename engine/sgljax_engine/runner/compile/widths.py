"""Finds, on the device itself, which widths of token tiles give a token the same bits.

Within one width, a token's bits depend on nothing else, by construction: every tile goes through
the same compiled loop body (`layers.tiles`), and attention sums in a fixed order
(`attention.batch_invariant`). One width for everything would be slow for few tokens, or for many.
So before an engine starts, it runs the same tokens through a layer of each kind in tiles of each
width, and uses only widths whose logits have the bits of `SMALL_BATCH`. These are all widths if
matrix products of every width sum in the same order, as in XLA's CPU library they mostly do.

Kernels that are batch-invariant need no tiles. Those of GPUs go through the same test.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sgljax_engine.attention.base import AttentionOptions, PrepareHeads
from sgljax_engine.cache.kv_pages import LayerKV
from sgljax_engine.cache.layer_states import LayerState, state_shapes
from sgljax_engine.errors import InvalidConfigError
from sgljax_engine.layers.basic import SMALL_BATCH
from sgljax_engine.layers.delta_net import NetInputs
from sgljax_engine.layers.tiles import tokens_in_tiles
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models.spec import LayerCache, ModelContext, ModelDefinition, NewKV, Params
from sgljax_engine.runner.programs.attend import own_attend
from sgljax_engine.xla_options import compiler_options

logger = logging.getLogger(__name__)

CANDIDATES = (16, SMALL_BATCH, 128, 256)
"""Widths to try, ascending."""

_NUM_TOKENS = 2 * CANDIDATES[-1]
_LAYERS = "model.layers."


def agreeing_widths(
    model: ModelDefinition,
    context: ModelContext,
    weights: Mapping[str, jax.Array],
    is_own_cpu: bool,
) -> tuple[int, ...]:
    """The candidates that round like `SMALL_BATCH`, itself included, ascending. Any thread.

    Args:
        model: The architecture.
        context: The model's context; `tile_widths` is ignored.
        weights: Physical weights.
        is_own_cpu: Whether the devices are CPUs of this process.

    Raises:
        InvalidConfigError: when a token's bits depend on its place even within one width.
    """
    probe = _Probe(model, context, weights, is_own_cpu)
    expected = probe.logits(probe.in_order, SMALL_BATCH)

    def agrees(width: int) -> bool:
        # Compared on the devices: logits of a large vocabulary are much to fetch.
        return bool(_has_bits_of(probe.logits(probe.order, width), expected, probe.order))

    if not agrees(SMALL_BATCH):
        raise _cannot_be_kept("its place in the batch")
    agreeing = tuple(width for width in CANDIDATES if width == SMALL_BATCH or agrees(width))
    logger.info("tokens have the same bits in tiles of %s, of %s tried", agreeing, CANDIDATES)
    return agreeing


def require_invariance(
    model: ModelDefinition,
    context: ModelContext,
    prepare: PrepareHeads | None,
    weights: Mapping[str, jax.Array],
    is_own_cpu: bool,
) -> None:
    """Checks kernels that are batch-invariant, for all tokens and for few. Any thread.

    Args:
        model: The architecture.
        context: The model's context, without `tile_widths`.
        prepare: What makes queries and keys of projections, if not the model.
        weights: Physical weights.
        is_own_cpu: Whether the devices are CPUs of this process.

    Raises:
        InvalidConfigError: when a token's bits depend on the others, or on their number.
    """
    probe = _Probe(model, context, weights, is_own_cpu, prepare)
    expected = probe.logits(probe.in_order)
    for number in (1, SMALL_BATCH, _NUM_TOKENS):
        some = probe.order[:number]
        if not _has_bits_of(probe.logits(some), expected, some):
            raise _cannot_be_kept(f"what it is computed with, here {number} of {_NUM_TOKENS}")


def _cannot_be_kept(what: str) -> InvalidConfigError:
    return InvalidConfigError(
        "enable_deterministic_sampling cannot be kept here: on this device the bits of a token "
        f"depend on {what}"
    )


class _Probe:
    """A few layers of a model, and tokens to run through them, in order or not."""

    def __init__(
        self,
        model: ModelDefinition,
        context: ModelContext,
        weights: Mapping[str, jax.Array],
        is_own_cpu: bool,
        prepare: PrepareHeads | None = None,
    ) -> None:
        rng = np.random.default_rng(0)
        vocab_size, length = context.config.vocab_size, context.config.context_length
        self._ids = rng.integers(0, vocab_size, _NUM_TOKENS, dtype=np.int32)
        self._positions = rng.integers(0, length, _NUM_TOKENS, dtype=np.int32)
        config, layers = _one_of_each_layer(context.config)
        self._model, self._context = model, context._replace(config=config)
        self._weights, self._prepare = _weights_of_layers(weights, layers), prepare
        self.in_order, self.order = np.arange(_NUM_TOKENS), rng.permutation(_NUM_TOKENS)
        # One function for both orders of a width, so that each width is compiled once.
        options = compiler_options(is_own_cpu)
        self._run = jax.jit(_few_layers, static_argnums=(0, 1, 2), compiler_options=options)

    def logits(self, order: np.ndarray, width: int | None = None) -> jax.Array:
        """The logits of the tokens in this order, in tiles of a width or together."""
        tiled = self._context._replace(tile_widths=() if width is None else (width,))
        ids, positions = self._ids[order], self._positions[order]
        num_tokens = np.int32(len(order))
        return self._run(
            self._model, tiled, self._prepare, self._weights, ids, positions, num_tokens
        )


@jax.jit
def _has_bits_of(found: jax.Array, expected: jax.Array, order: jax.Array) -> jax.Array:
    """Whether row i of float32 logits has the bits of the expected row `order[i]`, for all i."""
    found, expected = (lax.bitcast_convert_type(x, jnp.uint32) for x in (found, expected))
    return (found == expected[order]).all()


def _one_of_each_layer(config: ModelConfig) -> tuple[ModelConfig, list[int]]:
    """A model of the first layer of each kind, and which layers these are.

    Layers that differ in their window alone are of one kind.
    """
    attention = config.attention
    are_alike = attention.full_kv is None and not attention.kv_layers
    kinds: dict[tuple[bool, bool, bool], int] = {}
    for layer in range(config.num_layers):
        slides = attention.slides(layer) and not are_alike
        kind = config.kv_layer(layer) == layer, slides, config.has_state(layer)
        kinds.setdefault(kind, layer)
    owners = {slides: index for index, (owns_kv, slides, _) in enumerate(kinds) if owns_kv}
    attention = dataclasses.replace(
        attention,
        sliding_layers=() if are_alike else tuple(slides for _, slides, _ in kinds),
        kv_layers=tuple(owners[slides] for _, slides, _ in kinds) if attention.kv_layers else (),
    )
    nets = config.linear_attention
    if nets is not None:
        nets = dataclasses.replace(nets, layers=tuple(has_state for *_, has_state in kinds))
    few = dataclasses.replace(
        config, num_layers=len(kinds), attention=attention, linear_attention=nets
    )
    return few, list(kinds.values())


def _weights_of_layers(
    weights: Mapping[str, jax.Array], layers: Sequence[int]
) -> dict[str, jax.Array]:
    """The weights of some layers, numbered anew, and those of no layer."""
    places = {str(layer): str(index) for index, layer in enumerate(layers)}
    found: dict[str, jax.Array] = {}
    for name, weight in weights.items():
        if not name.startswith(_LAYERS):
            found[name] = weight
            continue
        layer, rest = name.removeprefix(_LAYERS).split(".", 1)
        if layer in places:
            found[f"{_LAYERS}{places[layer]}.{rest}"] = weight
    return found


def _few_layers(
    model: ModelDefinition,
    context: ModelContext,
    prepare: PrepareHeads | None,
    weights: Params,
    ids: jax.Array,
    positions: jax.Array,
    num_tokens: jax.Array,
) -> jax.Array:
    """Logits [T, V] of a model of few layers in which each token sees only itself."""

    def attend(
        q: jax.Array, new: NewKV | None, layer: LayerCache | None, options: AttentionOptions
    ) -> tuple[jax.Array, LayerCache]:
        del options
        if new is not None:
            layer = LayerKV(*new)
        assert isinstance(layer, LayerKV)
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in layer)
        # Meaningless values, but all bits of some channels of each input.
        kind = jnp.arange(q.shape[-1], dtype=jnp.int32) % 3
        return jnp.where(kind == 0, q, jnp.where(kind == 1, k, v)), layer

    net = context.config.linear_attention

    def recur(
        inputs: NetInputs, weight: jax.Array, layer: LayerCache | None
    ) -> tuple[jax.Array, LayerCache]:
        del weight
        assert net is not None
        assert layer is None
        found = jnp.concatenate([x.astype(jnp.float32) for x in inputs], axis=1)
        channels = np.linspace(0, found.shape[1] - 1, net.num_values, dtype=np.int32)
        values = found[:, channels].reshape(-1, net.num_value_heads, net.value_dim)
        return values, LayerState(*(jnp.zeros(s, jnp.float32) for s in state_shapes(net, 1)))

    tokens = tokens_in_tiles(context.tile_widths, ids.shape[0], num_tokens)
    own = own_attend(prepare, attend)
    logits, _ = model.token_logits(
        weights, context, ids, positions, own, None, tokens, None, None if net is None else recur
    )
    return logits
