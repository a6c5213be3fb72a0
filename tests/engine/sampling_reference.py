"""What sampling means, in numpy and float64, written without a look at the engine's code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sgljax_engine import ModelConfig, SamplingParams


def log_softmax(logits: np.ndarray) -> np.ndarray:
    peak = logits.max(-1, keepdims=True)
    return logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))


def adjust(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: Sequence[int] = (),
) -> np.ndarray:
    """The logits of one row after masks, bias and penalties, token by token."""
    out = np.array(logits, np.float64)
    for token in range(len(out)):
        forbidden = token in params.bad_token_ids
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            forbidden = True
        if len(output) < params.min_new_tokens and token in stop_ids:
            forbidden = True
        if forbidden:
            out[token] = -np.inf
            continue
        out[token] += (params.logit_bias or {}).get(token, 0.0)
        if token in output or token in prompt:
            penalty = params.repetition_penalty
            out[token] = out[token] * penalty if out[token] < 0 else out[token] / penalty
        count = list(output).count(token)
        out[token] -= params.frequency_penalty * count
        if count:
            out[token] -= params.presence_penalty
    return out


def distribution(adjusted: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities of the next token of one row: temperature, top-k, top-p, min-p, by sorting."""
    if params.temperature == 0:
        return np.eye(len(adjusted))[adjusted.argmax()]
    probs = np.exp(log_softmax(adjusted.astype(np.float64) / params.temperature))
    order = np.argsort(-probs, kind="stable")
    if params.top_k is not None and params.top_k != -1:
        probs[order[params.top_k :]] = 0.0
    probs /= probs.sum()
    if params.top_p < 1.0:
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= params.top_p]] = 0.0
    probs[probs < params.min_p * probs.max()] = 0.0
    return probs / probs.sum()


def forward(
    weights: Mapping[str, np.ndarray], model: ModelConfig, tokens: Sequence[int]
) -> np.ndarray:
    """Logits [T, V] of an untied Qwen3, dense and in float64; weights as Hugging Face has them."""

    def get(name: str) -> np.ndarray:
        return weights[name + ".weight"].astype(np.float64)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + model.rms_norm_eps) * get(name)

    num, dim, half = len(tokens), model.head_dim, model.head_dim // 2
    angles = np.arange(num)[:, None] / model.rope.theta ** (np.arange(half) * 2 / dim)
    rotation = np.exp(1j * angles)[:, None, :]

    def rotate(x: np.ndarray) -> np.ndarray:
        rotated = (x[..., :half] + 1j * x[..., half:]) * rotation
        return np.concatenate([rotated.real, rotated.imag], -1)

    x = get("model.embed_tokens")[list(tokens)]
    future = np.triu(np.full((num, num), -np.inf), 1)
    for i in range(model.num_layers):
        layer = f"model.layers.{i}."
        attn = layer + "self_attn."
        h = norm(x, layer + "input_layernorm")
        q, k, v = ((h @ get(f"{attn}{p}_proj").T).reshape(num, -1, dim) for p in "qkv")
        q, k = rotate(norm(q, attn + "q_norm")), rotate(norm(k, attn + "k_norm"))
        group = model.num_heads // model.num_kv_heads
        k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
        scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(dim) + future
        mixed = np.einsum("nts,snh->tnh", np.exp(log_softmax(scores)), v)
        x = x + mixed.reshape(num, -1) @ get(attn + "o_proj").T
        h = norm(x, layer + "post_attention_layernorm")
        gate = h @ get(layer + "mlp.gate_proj").T
        up = h @ get(layer + "mlp.up_proj").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ get(layer + "mlp.down_proj").T
    return norm(x, "model.norm") @ get("lm_head").T
