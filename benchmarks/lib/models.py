"""Tunix models with random weights, or from a Hugging Face folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.models.qwen3.model import Qwen3

from benchmarks.lib.shapes import PAD_ID
from sgljax_engine import ModelConfig
from tunix_sgljax.training.models import find_model, load_policy, tunix_config
from tunix_sgljax.training.schema import ModelSection

_PAD_LOGIT_SCALE = 0.1
_EMBEDDING = "input_embedding"


def make_tunix_model(config: ModelConfig, seed: int = 0, dtype: Any = jnp.float32) -> Qwen3:
    """Returns a Tunix Qwen3 with random non-zero weights.

    The pad token's embedding is small, so that greedy decoding does not choose it: the vanilla
    sampler would then hide the token from later steps, and outputs would differ.
    """
    shape = dataclasses.replace(tunix_config(config), dtype=dtype, param_dtype=dtype)
    # Shapes first and values later: Tunix's own initialisation leaves MLPs zero, and would hold
    # memory that a peak measurement then includes.
    model = nnx.eval_shape(lambda: Qwen3(shape, rngs=nnx.Rngs(0)))
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


def load_tunix_model(folder: str | Path, dtype: str) -> nnx.Module:
    """Returns the model of a Hugging Face folder, read by Tunix's own loader, on one device.

    Raises:
        InvalidConfigError: for a model that Tunix or its loader lacks.
    """
    section = ModelSection(model_path=str(folder), dtype=dtype)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    return load_policy(section, find_model(section), mesh)
