"""Qwen3, dense (Qwen3 Technical Report, 2025): GQA with normalised queries and keys, SwiGLU."""

from __future__ import annotations

import jax

from sgljax_engine.cache.kv_pages import LayerKV
from sgljax_engine.config import ModelConfig
from sgljax_engine.layers.basic import (
    apply_rope,
    embed,
    linear,
    rms_norm,
    rope_tables,
    unembed,
)
from sgljax_engine.models.spec import (
    Attend,
    ModelContext,
    ModelDefinition,
    ParamKind,
    Params,
    ParamSpec,
)


def _param_specs(config: ModelConfig) -> dict[str, ParamSpec]:
    dim, mlp = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    specs: dict[str, ParamSpec] = {}

    def project(name: str, shape: tuple[int, int], axes: tuple[str | None, str | None]) -> None:
        specs[f"{name}.weight"] = ParamSpec(shape, ParamKind.LINEAR, axes, f"{name}.weight")

    def norm(name: str, size: int) -> None:
        specs[f"{name}.weight"] = ParamSpec((size,), ParamKind.NORM, (None,), f"{name}.scale")

    def table(name: str) -> None:
        specs[f"{name}.weight"] = ParamSpec(
            (config.vocab_size, dim),
            ParamKind.EMBEDDING,
            ("vocab", None),
            f"{name}.embedding",
        )

    table("model.embed_tokens")
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        norm(f"{layer}.input_layernorm", dim)
        project(f"{layer}.self_attn.q_proj", (dim, heads), (None, "heads"))
        project(f"{layer}.self_attn.k_proj", (dim, kv_heads), (None, "kv_heads"))
        project(f"{layer}.self_attn.v_proj", (dim, kv_heads), (None, "kv_heads"))
        project(f"{layer}.self_attn.o_proj", (heads, dim), ("heads", None))
        norm(f"{layer}.self_attn.q_norm", config.head_dim)
        norm(f"{layer}.self_attn.k_norm", config.head_dim)
        norm(f"{layer}.post_attention_layernorm", dim)
        project(f"{layer}.mlp.gate_proj", (dim, mlp), (None, "mlp"))
        project(f"{layer}.mlp.up_proj", (dim, mlp), (None, "mlp"))
        project(f"{layer}.mlp.down_proj", (mlp, dim), ("mlp", None))
    norm("model.norm", dim)
    if not config.tie_word_embeddings:
        table("lm_head")
    return specs


def _forward(
    params: Params,
    context: ModelContext,
    input_ids: jax.Array,
    positions: jax.Array,
    attend: Attend,
    kv: tuple[LayerKV, ...] | None,
) -> tuple[jax.Array, tuple[LayerKV, ...] | None]:
    config, eps = context.config, context.config.rms_norm_eps
    sin, cos = rope_tables(positions, config.head_dim, config.rope_theta)
    x = embed(params["model.embed_tokens.weight"], input_ids)
    new_kv: list[LayerKV] = []
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        h = rms_norm(x, params[prefix + "input_layernorm.weight"], eps)
        q, k, v = _project_qkv(params, context, prefix + "self_attn.", h, sin, cos)
        out, layer_kv = attend(q, k, v, None if kv is None else kv[i])
        if layer_kv is not None:
            new_kv.append(layer_kv)
        out = out.reshape(out.shape[0], -1)
        x = x + linear(out, params[prefix + "self_attn.o_proj.weight"], context.layout)
        h = rms_norm(x, params[prefix + "post_attention_layernorm.weight"], eps)
        x = x + _mlp(params, context, prefix + "mlp.", h)
    hidden = rms_norm(x, params["model.norm.weight"], eps)
    return hidden, None if kv is None else tuple(new_kv)


def _project_qkv(
    params: Params,
    context: ModelContext,
    prefix: str,
    h: jax.Array,
    sin: jax.Array,
    cos: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    config, num_tokens = context.config, h.shape[0]

    def project(name: str) -> jax.Array:
        out = linear(h, params[f"{prefix}{name}.weight"], context.layout)
        return out.reshape(num_tokens, -1, config.head_dim)

    q = rms_norm(project("q_proj"), params[prefix + "q_norm.weight"], config.rms_norm_eps)
    k = rms_norm(project("k_proj"), params[prefix + "k_norm.weight"], config.rms_norm_eps)
    return apply_rope(q, sin, cos), apply_rope(k, sin, cos), project("v_proj")


def _mlp(params: Params, context: ModelContext, prefix: str, h: jax.Array) -> jax.Array:
    gate = linear(h, params[prefix + "gate_proj.weight"], context.layout)
    up = linear(h, params[prefix + "up_proj.weight"], context.layout)
    return linear(jax.nn.silu(gate) * up, params[prefix + "down_proj.weight"], context.layout)


def _logits(params: Params, context: ModelContext, hidden: jax.Array) -> jax.Array:
    tied = context.config.tie_word_embeddings
    return unembed(hidden, params["model.embed_tokens.weight" if tied else "lm_head.weight"])


MODEL = ModelDefinition(param_specs=_param_specs, forward=_forward, logits=_logits)
