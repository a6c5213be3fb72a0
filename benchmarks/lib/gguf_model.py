"""Writes a model's weights as a GGUF file, the format that llama.cpp loads.

The file has no vocabulary, so its users pass token ids. llama.cpp rotates Qwen3's heads by halves,
as Hugging Face does: no weight is permuted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Stored

from sgljax_engine import ModelConfig

STORED_TYPES = {"float32": Stored.F32, "bfloat16": Stored.BF16, "int8": Stored.Q8_0}
"""The storage types that `write_gguf` knows, as ggml calls them."""


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
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_layers)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.QWEN3])
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(config.rope.theta))
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    for name, array in weights.items():
        stored_name = names.get_name(name, try_suffixes=(".weight",))
        if stored_name is None:
            raise ValueError(f"no weight of Qwen3: {name!r}")
        out_in = np.ascontiguousarray(array.T if name.endswith("_proj.weight") else array)
        kind = Stored.F32 if array.ndim == 1 else STORED_TYPES[dtype]
        writer.add_tensor(stored_name, gguf.quantize(out_in, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
