"""The interface of a model to the rest of the engine."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sgljax_engine.attention.base import AttentionOptions, Projections
from sgljax_engine.cache.contiguous_kv import DecodeCache
from sgljax_engine.cache.kv_pages import LayerKV
from sgljax_engine.cache.layer_states import LayerState, VerifyState
from sgljax_engine.layers.basic import Layout
from sgljax_engine.layers.delta_net import NetInputs
from sgljax_engine.layers.kernels import Kernels, Options, Weight, XlaKernels
from sgljax_engine.layers.tiles import Tokens
from sgljax_engine.model_config import ModelConfig

Params = Mapping[str, jax.Array]
"""Physical weights by parameter name: a pytree that programs take as an argument."""

NewKV = tuple[jax.Array, jax.Array]
"""Keys and values of the tokens of a pass, each [T, K, H]."""

LayerCache = LayerKV | DecodeCache | LayerState | VerifyState
"""One layer's cache. Models only pass it on."""

Attend = Callable[
    [jax.Array, NewKV | None, LayerCache | None, AttentionOptions],
    tuple[jax.Array, LayerCache],
]
"""`attend(q[T, N, H], (k[T, K, H], v[T, K, H]), layer_kv, options) -> (out[T, N, H], layer_kv)`.

The model computes q, k and v and gives the layer's options; the caller decides where keys live: in
pages, also in contiguous KV (decode on CPUs), or only in the batch (scoring), where `layer_kv` is
None at first. With None instead of k and v it attends to what an earlier layer of the same pass has
put into `layer_kv`.
"""


AttendProjections = Callable[
    [Projections, LayerCache | None, AttentionOptions], tuple[jax.Array, LayerCache]
]
"""(projections, layer_kv, options) -> as `Attend`."""


class ProjectionAttend(NamedTuple):
    """An `Attend` that also takes projections, of layers with a prologue and keys of their own.

    Attributes:
        attend: Of queries and keys.
        from_projections: Of projections.
    """

    attend: Attend
    from_projections: AttendProjections

    def __call__(
        self,
        q: jax.Array,
        new: NewKV | None,
        layer: LayerCache | None,
        options: AttentionOptions,
    ) -> tuple[jax.Array, LayerCache]:
        """`attend`."""
        return self.attend(q, new, layer, options)


Recur = Callable[[NetInputs, jax.Array, LayerCache | None], tuple[jax.Array, LayerCache]]
"""`recur(inputs, conv_weight[C, W], layer_state) -> (out[T, V, d] float32, layer_state)`.

The counterpart of `Attend` for gated delta nets: the caller decides where states live. The shape
legend is that of `layers.delta_net`.
"""


class KVHeads(NamedTuple):
    """The logical axis of so many key or value heads, which may be fewer than the devices."""

    num_heads: int


ParamAxis = str | KVHeads | None
"""A logical axis that tensor parallelism shards; None is never sharded."""


EXPERTS_AXIS = "experts"
"""The logical axis of experts, sharded where their width is not: see `layers.experts`."""


class ParamKind(enum.Enum):
    """Kind of a parameter, which decides its physical layout and how HF stores it."""

    LINEAR = "linear"
    EXPERTS = "experts"
    """Projections of all experts of a layer, stacked along the first axis."""
    EMBEDDING = "embedding"
    """A table [vocab, dim] whose rows are looked up."""
    HEAD = "head"
    """A table [vocab, dim] that hidden states are multiplied with; tied, it is looked up too."""
    NORM = "norm"
    OFFSET_NORM = "offset_norm"
    """A norm's weight minus one."""
    BIAS = "bias"
    SCALE = "scale"
    """A factor of activations."""
    RECURRENT = "recurrent"
    """A small weight of a recurrence, which would amplify its rounding: always float32."""

    @property
    def is_projection(self) -> bool:
        """Whether its last two axes are [in, out], which the layout may swap."""
        return self in (ParamKind.LINEAR, ParamKind.EXPERTS)


class ParamSpec(NamedTuple):
    """One parameter in its *logical* form.

    Attributes:
        shape: Logical shape: linear weights are [in, out], those of experts [experts, in, out],
            embedding tables [vocab, dim].
        kind: See `ParamKind`.
        axes: Logical axes for sharding, one per dimension.
        alias: The name that Tunix's `sglang_jax` mappings use for it.
    """

    shape: tuple[int, ...]
    kind: ParamKind
    axes: tuple[ParamAxis, ...]
    alias: str


class ModelContext(NamedTuple):
    """Static facts that a forward pass is compiled for. Hashable.

    Attributes:
        tile_widths: Widths of tiles that all give a token the same bits, ascending
            (`runner.compile.widths`); empty to process a whole batch together, which gives them
            only with kernels that are batch-invariant.
        kernels: The computations of the backend.
        lora_rank: Rank of each adapter slot; 0 without adapters.
        returns_routed: Whether `forward` returns the experts of each token.
        dtype: Of weights that are not quantised.
    """

    config: ModelConfig
    layout: Layout
    tile_widths: tuple[int, ...] = ()
    kernels: Kernels = XlaKernels()
    lora_rank: int = 0
    returns_routed: bool = False
    dtype: jnp.dtype = jnp.dtype("float32")

    @property
    def is_tiled(self) -> bool:
        """Whether a token gets the same bits in any batch by going through tiles."""
        return bool(self.tile_widths)

    @property
    def options(self) -> Options:
        """How its kernels compute."""
        return Options(self.layout, self.is_tiled)

    @property
    def has_experts(self) -> bool:
        """Whether unused tokens would cost the time of their experts."""
        return self.config.moe is not None

    def linear(self, weight: Weight, x: jax.Array) -> jax.Array:
        """`x @ W` over features, with activations and weight in the layout."""
        return self.kernels.linear(weight, x, self.options)


class Forward(NamedTuple):
    """Results of a forward pass.

    Attributes:
        hidden: [T, D].
        kv: A cache for each of `ModelConfig.cached_layers`, then a state for each of its
            `state_layers`; None if it was given none.
        routed: [T, num_layers * k] of `MoEConfig.id_dtype`, the experts of each token, as in
            `KVPages`; None unless `ModelContext.returns_routed`.
    """

    hidden: jax.Array
    kv: tuple[LayerCache, ...] | None
    routed: jax.Array | None = None


class ModelDefinition(NamedTuple):
    """An architecture.

    Attributes:
        config_from_hf: Builds the config from the contents of HF's config.json; refuses what is not
            implemented.
        param_specs: All parameters of a config, by Hugging Face's dotted names.
        forward: (params, context, input_ids[T], positions[T], attend, kv, tokens, adapters[T],
            recur) -> `Forward`. `tokens` says how tokens go through the layers. `adapters` holds
            the adapter slot of each token, int32, -1 for none; None if no token has one. `recur` is
            None for models without recurrent states.
        logits: (params, context, hidden[T, D], adapters[T]) -> [T, V] float32.
    """

    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    param_specs: Callable[[ModelConfig], dict[str, ParamSpec]]
    forward: Callable[
        [
            Params,
            ModelContext,
            jax.Array,
            jax.Array,
            Attend,
            tuple[LayerCache, ...] | None,
            Tokens,
            jax.Array | None,
            Recur | None,
        ],
        Forward,
    ]
    logits: Callable[[Params, ModelContext, jax.Array, jax.Array | None], jax.Array]

    def token_logits(
        self,
        params: Params,
        context: ModelContext,
        input_ids: jax.Array,
        positions: jax.Array,
        attend: Attend,
        kv: tuple[LayerCache, ...] | None,
        tokens: Tokens,
        adapters: jax.Array | None = None,
        recur: Recur | None = None,
    ) -> tuple[jax.Array, Forward]:
        """Runs `forward`, and computes the logits [T, V] of all its tokens."""
        out = self.forward(
            params, context, input_ids, positions, attend, kv, tokens, adapters, recur
        )

        def to_logits(args: tuple[jax.Array, jax.Array | None]) -> jax.Array:
            return self.logits(params, context, *args)

        both = tokens.split(out.hidden), None if adapters is None else tokens.split(adapters)
        return tokens.join(tokens.map(to_logits, both)), out
