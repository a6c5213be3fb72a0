"""Models as Tunix takes them: with random weights, or from a Hugging Face folder."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.models.qwen3.model import ModelConfig as TunixConfig
from tunix.models.qwen3.model import Qwen3

from sgljax_engine import ModelConfig, UnsupportedModelError
from tunix_sgljax.bench.shapes import PAD_ID

_PAD_LOGIT_SCALE = 0.1
_EMBEDDING = "input_embedding"

_PACKAGES = {
    "LlamaForCausalLM": "llama3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Tunix's package of an architecture, of those that are loaded here."""


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


def load_tunix_model(folder: str | Path, config: ModelConfig, dtype: Any) -> Any:
    """Returns the model of a Hugging Face folder, read by Tunix's own loader.

    Args:
        folder: The folder.
        config: Its shape.
        dtype: Of weights and activations.

    Raises:
        UnsupportedModelError: for an architecture that is not loaded here.
    """
    package = _PACKAGES.get(config.architecture)
    if package is None:
        raise UnsupportedModelError(
            f"Tunix's {config.architecture} is not loaded from a folder here, only "
            f"{', '.join(_PACKAGES)}"
        )
    models = importlib.import_module(f"tunix.models.{package}.model")
    params = importlib.import_module(f"tunix.models.{package}.params")
    tied = "weight_tying" if package == "llama3" else "use_tied_embedding"
    fields: dict[str, Any] = {tied: config.tie_word_embeddings}
    if package != "llama3":  # whose layers take the dtype of their weights
        fields |= {"dtype": jnp.dtype(dtype), "param_dtype": jnp.dtype(dtype)}
    tunix_config = models.ModelConfig(
        num_layers=config.num_layers,
        vocab_size=config.vocab_size,
        embed_dim=config.hidden_size,
        hidden_dim=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rope_theta=int(config.rope.theta),
        norm_eps=config.rms_norm_eps,
        **fields,
    )
    return params.create_model_from_safe_tensors(str(folder), tunix_config, dtype=dtype)
