"""The models that the benchmarks run, with random weights, in the form that each peer takes."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.models.qwen3.model import ModelConfig as TunixConfig
from tunix.models.qwen3.model import Qwen3

from reporting import SMALL, SMALL_IN_WORDS
from sgljax_engine import ModelConfig

PAD_ID = 0
_CONTEXT_LENGTH = 8192
_PAD_LOGIT_SCALE = 0.1
_EMBEDDING = "input_embedding"


class IdTokenizer:
    """Space-separated token ids as text; pad 0, no BOS, an end token that never comes."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids in the text."""
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the ids as text."""
        return " ".join(str(int(token)) for token in ids)

    def bos_id(self) -> int:
        """Returns 0: no BOS."""
        return PAD_ID

    def eos_id(self) -> int:
        """Returns -1: no token ends a sequence."""
        return -1

    def pad_id(self) -> int:
        """Returns 0."""
        return PAD_ID


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchModel:
    """A model's shape; always float32, tied embeddings.

    Attributes:
        name: What results are filed under.
        config: In the engine's terms.
        in_words: For reports.
    """

    name: str
    config: ModelConfig
    in_words: str


_TINY = dataclasses.replace(
    SMALL, vocab_size=1024, hidden_size=192, intermediate_size=576, num_layers=6, num_heads=4
)

_QWEN3_0P6B = dataclasses.replace(
    SMALL,
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
)


def _model(name: str, config: ModelConfig, in_words: str) -> BenchModel:
    config = dataclasses.replace(config, context_length=_CONTEXT_LENGTH)
    vocabulary = f"vocabulary {config.vocab_size}, tied embeddings"
    return BenchModel(name=name, config=config, in_words=f"{in_words}, {vocabulary}")


MODELS = {
    model.name: model
    for model in (
        _model(
            "tiny",
            dataclasses.replace(_TINY, num_kv_heads=2),
            "Qwen3 of 6 layers, hidden 192, 4/2 heads of 64, MLP 576",
        ),
        _model("small", SMALL, SMALL_IN_WORDS),
        _model(
            "qwen3-0.6b",
            _QWEN3_0P6B,
            "Qwen3-0.6B's true shape: 28 layers, hidden 1024, 16/8 heads of 128, MLP 3072",
        ),
    )
}
"""By name; 3, 27 and 596 million parameters."""


def make_tunix_model(config: ModelConfig, seed: int = 0, dtype: Any = jnp.float32) -> Qwen3:
    """Returns a Tunix Qwen3 with random weights, none of them zero.

    The pad token's embedding is small, so that greedy decoding does not choose it: the vanilla
    sampler would then hide the token from later steps, and outputs would differ.
    """
    tunix_config = TunixConfig(
        num_layers=config.num_layers,
        vocab_size=config.vocab_size,
        embed_dim=config.hidden_size,
        hidden_dim=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rope_theta=int(config.rope.theta),
        norm_eps=config.rms_norm_eps,
        use_tied_embedding=config.tie_word_embeddings,
        dtype=dtype,
        param_dtype=dtype,
    )
    # Shapes first and values after: Tunix's own initialisation leaves MLPs zero, and would hold
    # memory that a measurement of the peak then sees.
    model = nnx.eval_shape(lambda: Qwen3(tunix_config, rngs=nnx.Rngs(0)))
    state = nnx.state(model)
    rng = np.random.default_rng(seed)

    def fill(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> jax.Array:
        if len(shape.shape) == 1:
            return jnp.ones(shape.shape, dtype)
        values = rng.standard_normal(shape.shape, np.float32)
        values *= 0.04
        if _EMBEDDING in jax.tree_util.keystr(path):
            values[PAD_ID] *= _PAD_LOGIT_SCALE
        return jnp.asarray(values, dtype)

    nnx.update(model, jax.tree_util.tree_map_with_path(fill, state))
    return model


def make_torch_model(model: Qwen3, config: ModelConfig) -> Any:
    """Returns a transformers Qwen3ForCausalLM with the same weights, in float32, for the CPU.

    Raises:
        ImportError: without torch.
    """
    # By name, for the type checker: the development environment has no torch.
    torch: Any = importlib.import_module("torch")
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hf_config = Qwen3Config(
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
