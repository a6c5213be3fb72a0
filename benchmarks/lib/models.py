"""Tunix models with random weights, or from a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import functools
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


def make_tunix_model(
    config: ModelConfig, seed: int = 0, dtype: Any = jnp.float32, scale: float = 0.04
) -> Qwen3:
    """Returns a Tunix Qwen3 with random non-zero weights, whose standard deviation is `scale`.

    The pad token's embedding is small, so that greedy decoding does not choose it: the vanilla
    sampler would then hide the token from later steps, and outputs would differ.
    """
    shape = dataclasses.replace(tunix_config(config), dtype=dtype, param_dtype=dtype)
    # Tunix's own initialisation leaves MLPs zero. One small program a shape: XLA takes 90 s on a
    # GPU for all weights of Qwen3-0.6B at once.
    model = nnx.eval_shape(lambda: Qwen3(shape, rngs=nnx.Rngs(0)))
    state = nnx.state(model)
    keys = iter(jax.random.split(jax.random.key(seed), len(jax.tree.leaves(state))))

    def fill(path: tuple[Any, ...], spec: jax.ShapeDtypeStruct) -> jax.Array:
        key = next(keys)
        if len(spec.shape) == 1:
            return jnp.ones(spec.shape, dtype)
        values = _normal(key, scale, spec.shape, dtype)
        is_table = _EMBEDDING in jax.tree_util.keystr(path)
        return values.at[PAD_ID].multiply(_PAD_LOGIT_SCALE) if is_table else values

    nnx.update(model, jax.tree_util.tree_map_with_path(fill, state))
    return model


@functools.partial(jax.jit, static_argnums=(2, 3))
def _normal(key: jax.Array, scale: float, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return (scale * jax.random.normal(key, shape)).astype(dtype)


def load_tunix_model(folder: str | Path, dtype: str) -> nnx.Module:
    """Returns the model of a Hugging Face folder, read by Tunix's own loader, on one device.

    Raises:
        InvalidConfigError: for a model that Tunix or its loader lacks.
    """
    section = ModelSection(model_path=str(folder), dtype=dtype)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    return load_policy(section, find_model(section), mesh)
