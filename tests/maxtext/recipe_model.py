"""The models of Tunix's recipes with MaxText, small."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.maxtext import actors, recipe
from tests.recipes.models import END_ID

_DIM = 32
_HEADS = ("base_num_query_heads=8", "base_num_kv_heads=4")
MODELS: dict[str, tuple[float, tuple[str, ...]]] = {
    "maxtext_qwen3": (5.0, _HEADS),
    "maxtext_qwen3_5": (
        0.4,
        (
            "model_name=qwen3.5-35b-a3b",
            *recipe.HYBRID,
            *_HEADS,
            "head_dim=16",
            "mrope_section=[1,1,0]",
            "scan_layers=False",
        ),
    ),
}
"""The end token's bias, and words of a model's config, by its name in the recipes."""


def make(name: str, mesh: jax.sharding.Mesh, dtype: str, seed: int) -> Any:
    """An adapter around one of `MODELS`, with layers as its recipe has them: scanned, or flat.

    Like `tests.recipes.models.make_model`: most completions end in time. Where all are cut off, the
    agentic learner changes no weight.
    """
    end_bias, words = MODELS[name]
    model = actors.make(*words, f"dtype={dtype}", mesh=mesh, pad_id=None).model
    common = np.full(_DIM, _DIM**-0.5)
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: jax.Array) -> jax.Array:
        where = jax.tree_util.keystr(path)
        if "scale" in where:
            return leaf
        array = 0.1 * rng.standard_normal(leaf.shape)
        if "embedding" in where:
            array += common
            array[END_ID] += end_bias * common
        elif "logits_dense" in where:
            array[:, END_ID] += end_bias * common
        return jax.device_put(jnp.asarray(array, leaf.dtype), leaf.sharding)

    state = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree_util.tree_map_with_path(draw, state))
    return model
