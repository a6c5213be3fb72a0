"""The interface of a model to the rest of the engine."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sgljax_engine.attention.base import AttentionOptions, NewTokens
from sgljax_engine.cache.kv_pages import LayerKV
from sgljax_engine.cache.layer_states import LayerState, VerifyState
from sgljax_engine.layers.delta_net import NetInputs
from sgljax_engine.layers.kernels import Kernels, XlaKernels
from sgljax_engine.model_config import ModelConfig

Params = Mapping[str, jax.Array]
"""Physical weights by parameter name: a pytree that programs take as an argument."""

LayerCache = LayerKV | LayerState | VerifyState
"""One layer's cache. Models only pass it on."""

Attend = Callable[
    [jax.Array | NewTokens, LayerCache, AttentionOptions], tuple[jax.Array, LayerCache]
]
"""`attend(tokens, layer_kv, options) -> (out[T, N, H], layer_kv)`.

The model computes queries, keys and values and gives the layer's options; the caller decides where
keys live. Given queries [T, N, H] alone, it attends to what an earlier layer of the same pass has
put into `layer_kv`.
"""

Recur = Callable[[NetInputs, jax.Array, LayerCache], tuple[jax.Array, LayerCache]]
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
    """Kind of a parameter, which decides its physical form and how HF stores it."""

    LINEAR = "linear"
    EXPERTS = "experts"
    """Projections of all experts of a layer, stacked along the first axis."""
    HEADS = "heads"
    """Projections of all heads of a layer, likewise."""
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
    ROUTER_BIAS = "router_bias"
    """Is added to a router's scores: always float32, since rounding may choose other experts."""

    @property
    def is_projection(self) -> bool:
        return self in (ParamKind.LINEAR, ParamKind.EXPERTS, ParamKind.HEADS)


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

    `dtype` is that of weights that are not quantised. `lora_rank` is that of each adapter slot, 0
    without adapters. `returns_routed`: `forward` returns the experts of each token.
    `expert_parallel_size` is that of `ParallelConfig`.
    """

    config: ModelConfig
    kernels: Kernels = XlaKernels()
    takes_projections: bool = False
    lora_rank: int = 0
    returns_routed: bool = False
    dtype: jnp.dtype = jnp.dtype("float32")
    expert_parallel_size: int = 1

    @property
    def activation_dtype(self) -> jnp.dtype:
        """Dtype of activations."""
        return self.kernels.activation_dtype(self.dtype)

    @property
    def has_experts(self) -> bool:
        """Whether unused tokens would cost the time of their experts."""
        return self.config.moe is not None


class Pass(NamedTuple):
    """Tokens on their way through the layers.

    Shape: input_ids, positions: [T] int32.

    Attributes:
        attend: Attention.
        caches: A cache for each of `ModelConfig.cached_layers`, then a state for each of its
            `state_layers`.
        adapters: [T] int32, the adapter slot of each token, -1 for none; None if no token has one.
        is_used: [T] bool, tokens whose results are read; None if all may be.
        recur: Recurrences; None for models without.
    """

    input_ids: jax.Array
    positions: jax.Array
    attend: Attend
    caches: tuple[LayerCache, ...]
    adapters: jax.Array | None = None
    is_used: jax.Array | None = None
    recur: Recur | None = None


class Forward(NamedTuple):
    """Results of a forward pass.

    Attributes:
        hidden: [T, D].
        caches: Those of the pass, with its tokens.
        routed: [T, num_layers * k] of `MoEConfig.id_dtype`, the experts of each token, as in
            `KVPages`; None unless `ModelContext.returns_routed`.
    """

    hidden: jax.Array
    caches: tuple[LayerCache, ...]
    routed: jax.Array | None = None


class ModelDefinition(NamedTuple):
    """An architecture.

    Attributes:
        config_from_hf: Builds the config from the contents of HF's config.json; refuses what is not
            implemented.
        param_specs: All parameters of a config, by Hugging Face's dotted names.
        forward: (params, context, `Pass`) -> `Forward`.
        logits: (params, context, hidden[T, D], adapters[T]) -> [T, V] float32.
    """

    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    param_specs: Callable[[ModelConfig], dict[str, ParamSpec]]
    forward: Callable[[Params, ModelContext, Pass], Forward]
    logits: Callable[[Params, ModelContext, jax.Array, jax.Array | None], jax.Array]
