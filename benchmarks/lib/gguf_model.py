"""Writes a model's weights as a GGUF file, the format that llama.cpp loads.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The file has no vocabulary,
so its users pass token ids. llama.cpp rotates Qwen3's heads by halves, as Hugging Face does:
no weight is permuted.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from sgljax_engine import ModelConfig

STORED_TYPES = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0"}
"""How ggml calls the storage types that `write_gguf` knows."""

_VERSION = 3
_ALIGNMENT = 32
_TYPE_NUMBERS = {"F32": 0, "Q8_0": 8, "BF16": 30}
_Q8_0_BLOCK = 32
_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path, config: ModelConfig, weights: Mapping[str, np.ndarray], dtype: str = "float32"
) -> None:
    """Writes a Qwen3 model.

    Args:
        path: The file.
        config: The model's.
        weights: The engine's logical weights in float32, projections as [in, out].
        dtype: Storage of matrices, one of `STORED_TYPES`; vectors stay float32.

    Raises:
        ValueError: for another architecture or dtype, or a weight that Qwen3 does not have.
    """
    if config.architecture != "Qwen3ForCausalLM":
        raise ValueError(f"architecture must be 'Qwen3ForCausalLM', got {config.architecture!r}")
    if dtype not in STORED_TYPES:
        raise ValueError(f"dtype must be one of {list(STORED_TYPES)}, got {dtype!r}")
    facts = _metadata(config)
    tensors = {gguf_name(name): _out_in(name, array) for name, array in weights.items()}
    types = {name: "F32" if a.ndim == 1 else STORED_TYPES[dtype] for name, a in tensors.items()}
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", _VERSION, len(tensors), len(facts)))
        for key, value in facts.items():
            file.write(_string(key) + _value(value))
        offset = 0
        for name, array in tensors.items():
            file.write(_tensor_head(name, array.shape, types[name], offset))
            offset += _padded(_num_bytes(array.size, types[name]))
        _pad(file)
        for name, array in tensors.items():
            file.write(encode(array, types[name]))
            _pad(file)


def gguf_name(name: str) -> str:
    """llama.cpp's name of a weight.

    Raises:
        ValueError: for a name that Qwen3 does not have.
    """
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise ValueError(f"no weight of Qwen3: {name!r}")
    return f"blk.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"


def encode(array: np.ndarray, stored_type: str) -> bytes:
    """The bytes of an array in one of ggml's types.

    Args:
        array: float32; for Q8_0 its last dimension is a multiple of 32.
        stored_type: "F32", "BF16" or "Q8_0".
    """
    if stored_type == "Q8_0":
        return _q8_0(array)
    dtype = ml_dtypes.bfloat16 if stored_type == "BF16" else np.float32
    return np.ascontiguousarray(array, dtype).tobytes()


def _q8_0(array: np.ndarray) -> bytes:
    """Blocks of 32 numbers: a float16 factor, the largest over 127, then int8."""
    if array.shape[-1] % _Q8_0_BLOCK:
        raise ValueError(f"Q8_0 needs a multiple of {_Q8_0_BLOCK}, got {array.shape[-1]}")
    blocks = np.ascontiguousarray(array, np.float32).reshape(-1, _Q8_0_BLOCK)
    factors = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    divisors = np.where(factors == 0, np.float32(1), factors)
    layout = np.dtype([("factor", np.float16), ("values", np.int8, (_Q8_0_BLOCK,))])
    stored = np.empty(len(blocks), layout)
    stored["factor"] = factors[:, 0]
    stored["values"] = np.rint(blocks / divisors)
    return stored.tobytes()


def _metadata(config: ModelConfig) -> dict[str, Any]:
    """Integers are uint32 in the file, floats float32."""
    facts = {
        "block_count": config.num_layers,
        "context_length": config.context_length,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope.theta),
        "vocab_size": config.vocab_size,
    }
    head = {"general.architecture": "qwen3", "tokenizer.ggml.model": "none"}
    return head | {f"qwen3.{name}": value for name, value in facts.items()}


def _out_in(name: str, array: np.ndarray) -> np.ndarray:
    """Projections as [out, in]; everything else as it is."""
    return array.T if name.endswith("_proj.weight") else array


def _num_bytes(num_values: int, stored_type: str) -> int:
    if stored_type == "Q8_0":
        return num_values // _Q8_0_BLOCK * (_Q8_0_BLOCK + 2)
    return num_values * (2 if stored_type == "BF16" else 4)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _pad(file: BinaryIO) -> None:
    file.write(bytes(_padded(file.tell()) - file.tell()))


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: str | float) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    return struct.pack("<If", 6, value)


def _tensor_head(name: str, shape: tuple[int, ...], stored_type: str, offset: int) -> bytes:
    """Dimensions go from the fastest to the slowest."""
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return _string(name) + dims + struct.pack("<IQ", _TYPE_NUMBERS[stored_type], offset)
