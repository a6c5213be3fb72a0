"""The gated delta net of a decoder layer, in the place of attention (Qwen3-Next, Qwen3.5).

What is here treats tokens alone: projections before the recurrence, and norm, gate and projection
after it. The recurrence itself is the caller's `Recur`, see `models.spec`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sgljax_engine.layers.basic import split_heads
from sgljax_engine.layers.delta_net import NetInputs
from sgljax_engine.model_config import LinearAttentionConfig
from sgljax_engine.models.spec import ModelContext, ParamKind, ParamSpec

PREFIX = "linear_attn."
"""What the parameters' names within a layer begin with."""


def net_specs(prefix: str, hidden_size: int, net: LinearAttentionConfig) -> dict[str, ParamSpec]:
    """The parameters of a layer's net; what is not of single heads is not sharded."""
    values, heads = net.num_values, net.num_value_heads
    if net.is_grouped:
        outputs = {"in_proj_qkvz": net.num_channels + values, "in_proj_ba": 2 * heads}
    else:
        outputs = {
            "in_proj_qkv": net.num_channels,
            "in_proj_z": values,
            "in_proj_b": heads,
            "in_proj_a": heads,
        }
    specs: dict[str, ParamSpec] = {}

    def add(name: str, shape: tuple[int, int], axes: tuple[str | None, str | None]) -> None:
        name = f"{prefix}{name}.weight"
        specs[name] = ParamSpec(shape, ParamKind.LINEAR, axes, name)

    for name, size in outputs.items():
        # Queries, keys and values one behind another: a part of these is not of single heads.
        add(name, (hidden_size, size), (None, None if name == "in_proj_qkv" else "heads"))
    add("out_proj", (values, hidden_size), ("heads", None))
    vectors: dict[str, tuple[tuple[int, ...], ParamKind]] = {
        "conv1d.weight": ((net.num_channels, net.conv_size), ParamKind.RECURRENT),
        "A_log": ((heads,), ParamKind.RECURRENT),
        "dt_bias": ((heads,), ParamKind.RECURRENT),
        "norm.weight": ((net.value_dim,), ParamKind.NORM),
    }
    for name, (shape, kind) in vectors.items():
        name = f"{prefix}{name}"
        specs[name] = ParamSpec(shape, kind, (None,) * len(shape), name)
    return specs


class Net(NamedTuple):
    """A layer's net; `linear` is a projection by its name within the layer."""

    params: Mapping[str, Any]
    context: ModelContext
    linear: Callable[[str, jax.Array], jax.Array]

    @property
    def config(self) -> LinearAttentionConfig:
        assert self.context.config.linear_attention is not None
        return self.context.config.linear_attention

    @property
    def conv_weight(self) -> jax.Array:
        """[C, W] float32."""
        return self.params[f"{PREFIX}conv1d.weight"]

    def before(self, h: jax.Array) -> tuple[NetInputs, jax.Array]:
        """What the recurrence takes of each token, and the gates [T, V * d] of its output."""
        qkv, z, b, a = self._grouped(h) if self.config.is_grouped else self._ungrouped(h)
        a_log, bias = (self.params[f"{PREFIX}{name}"][None] for name in ("A_log", "dt_bias"))
        a, b = (x.astype(jnp.float32) for x in (a, b))
        decay = -jnp.exp(a_log) * jax.nn.softplus(a + bias)
        return NetInputs(qkv, decay, jax.nn.sigmoid(b)), z

    def _ungrouped(self, h: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(self.linear(f"{PREFIX}in_proj_{name}", h) for name in ("qkv", "z", "b", "a"))

    def _grouped(self, h: jax.Array) -> tuple[jax.Array, ...]:
        """Takes apart what is grouped by key heads."""
        net = self.config
        values, num_tokens = net.ratio * net.value_dim, h.shape[0]

        def split(name: str, *sizes: int) -> list[jax.Array]:
            x = self.linear(PREFIX + name, h).reshape(num_tokens, net.num_key_heads, -1)
            ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
            return [part.reshape(num_tokens, -1) for part in jnp.split(x, ends, axis=-1)]

        q, k, v, z = split("in_proj_qkvz", net.key_dim, net.key_dim, values)
        b, a = split("in_proj_ba", net.ratio)
        return jnp.concatenate([q, k, v], axis=-1), z, b, a

    def after(self, out: jax.Array, z: jax.Array) -> jax.Array:
        """The net's output [T, D], of the recurrence's [T, V, d] float32 and its gates."""
        eps, weight = self.context.config.rms_norm_eps, self.params[f"{PREFIX}norm.weight"]
        normed = self.context.kernels.norm(out, weight, eps, 0.0)
        gates = split_heads(z, self.config.value_dim)
        gated = normed.astype(z.dtype) * jax.nn.silu(gates.astype(jnp.float32))
        gated = gated.astype(z.dtype)
        return self.linear(f"{PREFIX}out_proj", gated.reshape(gated.shape[0], -1))
