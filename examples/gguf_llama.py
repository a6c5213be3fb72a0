"""Converts a Llama in a GGUF file into a Hugging Face folder, with NumPy alone.

Weights are dequantised to float32, so nothing is lost. The tokenizer must be a byte-level BPE whose
pre-tokenizer is "smollm": every digit is a piece of its own, and the rest is split as GPT-2 does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_SPECIAL = 3  # a token's type in GGUF
_WEIGHTS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_WEIGHTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class UnsupportedFileError(ValueError):
    """The GGUF file holds something that this conversion does not know."""


def convert(gguf_file: Path, folder: Path, on_phase: Callable[[str], None]) -> None:
    """Writes config.json, generation_config.json, the tokenizer's files and model.safetensors.

    Args:
        gguf_file: A Llama, in any of the types that the package `gguf` dequantises.
        folder: An existing folder.
        on_phase: Called with a line about what begins.

    Raises:
        ImportError: the package `gguf` is not installed.
        UnsupportedFileError: names what the conversion does not know.
    """
    from gguf import GGUFReader

    on_phase(f"reading {gguf_file.name}")
    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = hf_config(fields)
    tokenizer = hf_tokenizer(fields)
    config["tie_word_embeddings"] = all(tensor.name != "output.weight" for tensor in reader.tensors)
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", special)
    tokenizer.save_pretrained(folder)
    on_phase(f"dequantising {len(reader.tensors)} tensors")
    weights = hf_weights(reader, config)
    on_phase(f"writing {sum(array.nbytes for array in weights.values()) / 1e6:.0f} MB of weights")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def hf_config(fields: dict[str, Any]) -> dict[str, Any]:
    """The content of config.json, from the file's metadata, but for `tie_word_embeddings`.

    Raises:
        UnsupportedFileError: the file holds no Llama, or one with scaled or partial rotations.
    """
    kind = fields["general.architecture"]
    if kind != "llama":
        raise UnsupportedFileError(f"general.architecture must be 'llama', got {kind!r}")
    num_heads, hidden_size = (
        fields[f"llama.{name}"] for name in ("attention.head_count", "embedding_length")
    )
    head_dim = fields.get("llama.attention.key_length", hidden_size // num_heads)
    if fields.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedFileError("llama.rope.dimension_count differs from the size of a head")
    if scaled := [name for name in fields if name.startswith("llama.rope.scaling")]:
        raise UnsupportedFileError(f"scaled rotations are not converted: {', '.join(scaled)}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden_size,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": head_dim,
        # float32 in the file: 1e-05, not 9.999999747378752e-06
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": fields["llama.rope.freq_base"],
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def hf_tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The file's tokenizer, with its chat template.

    Raises:
        UnsupportedFileError: it is of another kind.
    """
    kinds = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if kinds != ("gpt2", "smollm"):
        raise UnsupportedFileError(f"the tokenizer must be ('gpt2', 'smollm'), got {kinds}")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    fast = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    fast.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    fast.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, types, strict=True)
            if kind == _SPECIAL
        ]
    )
    bos, eos, unk, pad = (
        tokens[fields[f"tokenizer.ggml.{name}_token_id"]]
        for name in ("bos", "eos", "unknown", "padding")
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        bos_token=bos,
        eos_token=eos,
        unk_token=unk,
        pad_token=pad,
        clean_up_tokenization_spaces=False,
        model_max_length=fields["llama.context_length"],
        chat_template=fields["tokenizer.chat_template"],
    )


def hf_weights(reader: Any, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Float32 arrays by their Hugging Face names, of the tensors that a `GGUFReader` found.

    Raises:
        UnsupportedFileError: a tensor has an unknown name.
    """
    from gguf import dequantize

    weights = {}
    num_heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        for kind, num in num_heads.items():
            if f".{kind}." in tensor.name:
                array = _halves(array, num)
        weights[_hf_name(tensor.name)] = np.ascontiguousarray(array)
    return weights


def _halves(array: np.ndarray, num_heads: int) -> np.ndarray:
    """The rows of each head in Hugging Face's order: x of all pairs to rotate, then y of all.

    GGUF has x and y of a pair side by side.
    """
    pairs = array.reshape(num_heads, -1, 2, array.shape[-1])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _hf_name(name: str) -> str:
    if name in _WEIGHTS:
        return _WEIGHTS[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in _LAYER_WEIGHTS:
        raise UnsupportedFileError(f"the tensor {name!r} is none of a Llama's")
    return f"model.layers.{match[1]}.{_LAYER_WEIGHTS[match[2]]}.weight"


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
