"""The weights of a Tunix model as transformers takes them."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from flax import nnx
from tunix.models.qwen3.model import Qwen3

from sgljax_engine import ModelConfig
from tunix_sgljax.bench.shapes import PAD_ID


def make_hf_config(config: ModelConfig) -> Any:
    """Returns transformers' Qwen3Config of the same shape."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        tie_word_embeddings=config.tie_word_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.context_length,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        pad_token_id=PAD_ID,
        bos_token_id=None,
        eos_token_id=None,
    )


def make_torch_model(model: Qwen3, config: ModelConfig) -> Any:
    """Returns a transformers Qwen3ForCausalLM with the same weights, in float32, for the CPU.

    Raises:
        ImportError: without torch.
    """
    # By name, for the type checker: the development environment has no torch.
    torch: Any = importlib.import_module("torch")
    from transformers import Qwen3ForCausalLM

    hf_config = make_hf_config(config)
    with torch.device("meta"):
        torch_model = Qwen3ForCausalLM(hf_config)
    state = {
        name: torch.from_numpy(np.array(value, order="C"))
        for name, value in hf_arrays(model, config.hidden_size).items()
    }
    missing, unexpected = torch_model.load_state_dict(state, strict=False, assign=True)
    if missing not in ([], ["lm_head.weight"]) or unexpected:
        raise ValueError(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    torch_model.tie_weights()
    # Buffers (the rotary frequencies) are not in a checkpoint: made again, on the CPU.
    rotary = type(torch_model.model.rotary_emb)
    torch_model.model.rotary_emb = rotary(config=hf_config)
    return torch_model.eval()


def hf_arrays(model: Qwen3, hidden_size: int) -> dict[str, np.ndarray]:
    """Hugging Face's names and [out, in] layouts; views where possible."""

    def host(param: nnx.Variable) -> np.ndarray:
        return np.asarray(param[...])

    arrays = {
        "model.embed_tokens.weight": host(model.embedder.input_embedding),
        "model.norm.weight": host(model.final_norm.w),
    }
    for i, layer in enumerate(model.layers):
        prefix, attn, mlp = f"model.layers.{i}.", layer.attn, layer.mlp
        for name in ("q_proj", "k_proj", "v_proj"):  # [D, heads, head_dim]
            weight = host(getattr(attn, name).w).reshape(hidden_size, -1).T
            arrays[f"{prefix}self_attn.{name}.weight"] = weight
        # [heads, head_dim, D]
        arrays[f"{prefix}self_attn.o_proj.weight"] = host(attn.o_proj.w).reshape(-1, hidden_size).T
        for name in ("q_norm", "k_norm"):
            arrays[f"{prefix}self_attn.{name}.weight"] = host(getattr(attn, name).w)
        for name in ("gate_proj", "up_proj", "down_proj"):  # [in, out]
            arrays[f"{prefix}mlp.{name}.weight"] = host(getattr(mlp, name).kernel).T
        for name in ("input_layernorm", "post_attention_layernorm"):
            arrays[f"{prefix}{name}.weight"] = host(getattr(layer, name).w)
    return arrays
