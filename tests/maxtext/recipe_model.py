"""The model of Tunix's recipe with MaxText, small: what `model_source: maxtext` makes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.maxtext import actors
from tests.recipes.models import END_ID

_END_BIAS = 2.2
_DIM = 32


def make(mesh: jax.sharding.Mesh, dtype: str, seed: int) -> Any:
    """An adapter around Qwen3 with scanned layers, on a mesh of Tunix's axes.

    Like `tests.recipes.models.make_model`: most completions end in time.
    """
    words = ("base_num_query_heads=8", "base_num_kv_heads=4", f"dtype={dtype}")
    model = actors.make(*words, mesh=mesh, pad_id=None).model
    common = np.full(_DIM, _DIM**-0.5)
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if "scale" in name:
            return leaf
        array = 0.1 * rng.standard_normal(leaf.shape)
        if "embedding" in name:
            array += common
            array[END_ID] += _END_BIAS * common
        elif "logits_dense" in name:
            array[:, END_ID] += _END_BIAS * common
        return jax.device_put(jnp.asarray(array, leaf.dtype), leaf.sharding)

    state = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree_util.tree_map_with_path(draw, state))
    return model
