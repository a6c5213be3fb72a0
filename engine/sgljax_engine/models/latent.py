"""Multi-head latent attention of a decoder layer (DeepSeek-V2, 2024), in its absorbed form.

Keys and values of a head are projections of a latent that all heads share. A query is taken through
the keys' projection instead, and the attention's output through the values'. So attention is that
of many query heads to one key a token, the latent and a rotary part, whose latent is the value too.

Shape legend: T tokens, N heads, C channels of the latent, R rotary channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sgljax_engine.attention.base import NewTokens
from sgljax_engine.layers.basic import split_heads
from sgljax_engine.model_config import LatentConfig, ModelConfig
from sgljax_engine.models.spec import ModelContext, ParamAxis, ParamKind, ParamSpec

_PREFIX = "self_attn."
"""What the parameters' names within a layer begin with."""

KV_UP, K_UP, V_UP = "kv_b_proj", "k_b_proj", "v_b_proj"
"""Names of the latent's projection in files, and of its parts here, by head."""


class HeadsHook(NamedTuple):
    """Takes keys [N, nope, C] or values [N, C, v] out of a file's [N * (nope + v), C]."""

    latent: LatentConfig
    is_values: bool

    def __call__(self, x: jax.Array) -> jax.Array:
        """Traced by JAX."""
        sizes = self.latent
        x = x.reshape(-1, sizes.nope_dim + sizes.value_dim, sizes.rank)
        keys, values = x[:, : sizes.nope_dim], x[:, sizes.nope_dim :]
        return values.swapaxes(1, 2) if self.is_values else keys


def latent_specs(prefix: str, config: ModelConfig, latent: LatentConfig) -> dict[str, ParamSpec]:
    """The parameters of a layer's attention; latents are not sharded, heads are."""
    dim, num_heads, rank = config.hidden_size, config.num_heads, latent.rank
    specs: dict[str, ParamSpec] = {}

    def project(
        name: str, num_in: int, num_out: int, *axes: ParamAxis, has_bias: bool = False
    ) -> None:
        weight, bias = f"{prefix}.{name}.weight", f"{prefix}.{name}.bias"
        specs[weight] = ParamSpec((num_in, num_out), ParamKind.LINEAR, axes, weight)
        if has_bias:
            specs[bias] = ParamSpec((num_out,), ParamKind.BIAS, axes[1:], bias)

    def norm(name: str, size: int) -> None:
        name = f"{prefix}.{name}"
        specs[f"{name}.weight"] = ParamSpec((size,), ParamKind.NORM, (None,), f"{name}.scale")

    def of_heads(name: str, num_in: int, num_out: int) -> None:
        name, shape = f"{prefix}.{name}.weight", (num_heads, num_in, num_out)
        specs[name] = ParamSpec(shape, ParamKind.HEADS, ("heads", None, None), name)

    bias, num_queries = config.attention_bias, num_heads * latent.query_dim
    if latent.query_rank is None:
        project("q_proj", dim, num_queries, None, "heads")
    else:
        project("q_a_proj", dim, latent.query_rank, None, None, has_bias=bias)
        norm("q_a_layernorm", latent.query_rank)
        project("q_b_proj", latent.query_rank, num_queries, None, "heads")
    project("kv_a_proj_with_mqa", dim, latent.page_dim, None, None, has_bias=bias)
    norm("kv_a_layernorm", rank)
    of_heads(K_UP, latent.nope_dim, rank)
    of_heads(V_UP, rank, latent.value_dim)
    project("o_proj", num_heads * latent.value_dim, dim, "heads", None, has_bias=bias)
    return specs


class Latent(NamedTuple):
    """A layer's attention; `linear` is a projection by its name within the layer."""

    params: Mapping[str, Any]
    context: ModelContext
    linear: Callable[[str, jax.Array], jax.Array]

    @property
    def config(self) -> LatentConfig:
        latent = self.context.config.attention.latent
        assert latent is not None
        return latent

    def before(self, h: jax.Array, sin: jax.Array, cos: jax.Array) -> NewTokens:
        """Absorbed queries [T, N, C + R] and keys [T, 1, C + R], of hidden states [T, D]."""
        latent = self.config
        if latent.query_rank is None:
            q = self.linear(f"{_PREFIX}q_proj", h)
        else:
            q = self.norm("q_a_layernorm", self.linear(f"{_PREFIX}q_a_proj", h))
            q = self.linear(f"{_PREFIX}q_b_proj", q)
        q, q_rope = jnp.split(split_heads(q, latent.query_dim), (latent.nope_dim,), axis=-1)
        q = self.heads(K_UP, q)
        k = self.linear(f"{_PREFIX}kv_a_proj_with_mqa", h)
        k, k_rope = jnp.split(k, (latent.rank,), axis=-1)
        k = self.norm("kv_a_layernorm", k)
        q = jnp.concatenate([q, self.rotated(q_rope, sin, cos)], axis=-1)
        k_rope = self.rotated(k_rope[:, None], sin, cos)
        return NewTokens(q, jnp.concatenate([k[:, None], k_rope], axis=-1), None)

    def after(self, out: jax.Array) -> jax.Array:
        """The heads' values [T, N * v], of the attention's output [T, N, C + R]."""
        values = self.heads(V_UP, out[..., : self.config.rank])
        return values.reshape(values.shape[0], -1)

    def heads(self, name: str, x: jax.Array) -> jax.Array:
        return self.context.kernels.heads_linear(self.params[f"{_PREFIX}{name}.weight"], x)

    def norm(self, name: str, x: jax.Array) -> jax.Array:
        weight = self.params[f"{_PREFIX}{name}.weight"]
        return self.context.kernels.norm(x, weight, self.config.norm_eps, 0.0)

    def rotated(self, x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
        """Heads [T, n, R] with rotary embedding, of queries and keys alike in another order."""
        if self.config.is_interleaved:
            x = x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)
        return self.context.kernels.rotate(x, None, sin, cos)
