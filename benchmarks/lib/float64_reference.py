"""Log-probs of a Tunix Qwen3 in numpy's float64: what exact arithmetic would give.

Rotary tables alone are float32, as both the trainer's and the engine's are, so that what is left of
a difference is rounding in the layers and the head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sgljax_engine import ModelConfig
from sgljax_engine.layers.rope import rope_tables, rope_timescales

Weights = Mapping[tuple[Any, ...], np.ndarray]


def float64_logprobs(
    model: Any,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
) -> list[np.ndarray]:
    """Log-probs of each completion's tokens at temperature 1, float64 [tokens].

    Args:
        model: Tunix's Qwen3, with tied embeddings and float32 weights.
        config: Its shape.
        prompts: Token ids, at least one each.
        completions: Token ids behind each prompt.
    """
    state = nnx.to_flat_state(nnx.state(model))
    weights = {path: np.asarray(jax.device_get(leaf[...]), np.float64) for path, leaf in state}
    return [
        _completion_logprobs(weights, config, list(prompt), list(completion))
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def _completion_logprobs(
    weights: Weights, config: ModelConfig, prompt: list[int], completion: list[int]
) -> np.ndarray:
    hidden = _hidden(weights, config, np.asarray([*prompt, *completion[:-1]]))
    logits = hidden[len(prompt) - 1 :] @ weights["embedder", "input_embedding"].T
    logits -= logits.max(axis=-1, keepdims=True)
    chosen = logits[np.arange(len(completion)), completion]
    return chosen - np.log(np.exp(logits).sum(axis=-1))


def _hidden(weights: Weights, config: ModelConfig, ids: np.ndarray) -> np.ndarray:
    """What the head takes, [T, D]."""
    timescales = rope_timescales(config.head_dim, config.rope.theta)
    tables = rope_tables(jnp.arange(len(ids)), timescales)
    sin, cos = (np.asarray(table, np.float64) for table in tables)
    is_seen = np.tril(np.ones((len(ids), len(ids)), bool))
    group = config.num_heads // config.num_kv_heads

    def norm(x: np.ndarray, *path: Any) -> np.ndarray:
        rms = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config.rms_norm_eps)
        return weights[(*path, "w")] * x / rms

    def rotate(x: np.ndarray) -> np.ndarray:
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    x = weights["embedder", "input_embedding"][ids]
    for index in range(config.num_layers):
        layer, attn, mlp = (("layers", index, *part) for part in ((), ("attn",), ("mlp",)))
        h = norm(x, *layer, "input_layernorm")
        q, k, v = (
            np.einsum("td,dnh->tnh", h, weights[(*attn, name, "w")])
            for name in ("q_proj", "k_proj", "v_proj")
        )
        q = rotate(norm(q, *attn, "q_norm"))
        k = rotate(norm(k, *attn, "k_norm"))
        k, v = (np.repeat(each, group, axis=1) for each in (k, v))
        scores = np.einsum("qnh,knh->nqk", q, k) * config.head_dim**-0.5
        scores = np.where(is_seen, scores, -np.inf)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        out = np.einsum("nqk,knh->qnh", scores, v)
        x = x + np.einsum("tnh,nhd->td", out, weights[(*attn, "o_proj", "w")])
        h = norm(x, *layer, "post_attention_layernorm")
        gate, up = (h @ weights[(*mlp, name, "kernel")] for name in ("gate_proj", "up_proj"))
        x = x + (gate / (1.0 + np.exp(-gate)) * up) @ weights[(*mlp, "down_proj", "kernel")]
    return norm(x, "final_norm")
