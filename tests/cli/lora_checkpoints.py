"""LoRA checkpoints of the golden models, as Tunix's trainers write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.sft.checkpoint_manager import CheckpointManager

from tests import lora_models
from tests import tunix_reference as ref
from tests.cli.test_convert import load_into_tunix

ALPHA = 6.0
"""Alpha of all pairs."""

RULES: dict[str, tuple[dict[str, Any], ...]] = {
    "all": ({"module_path": ".*(attn|mlp|lm_head).*", "rank": 4, "alpha": ALPHA},),
    "two": (
        {"module_path": ".*attn.*", "rank": 3, "alpha": ALPHA},
        {"module_path": ".*/0/.*(gate|down)_proj", "rank": 2, "alpha": ALPHA},
    ),
}
"""All projections; and two ranks, of attention everywhere and of MLPs in the first layer."""

ADAPTERS = {"qwen3_gqa_tied": "two", "gemma2_window": "all"}
"""The goldens whose adapters PEFT has been given, with their rules."""


@ref.deprecations_ignored()
def make(name: str, rules: str = "all", seed: int = 1) -> Any:
    """The model of a golden folder with pairs that change what it computes."""
    model: Any = lora_models.add_pairs(load_into_tunix(name), RULES[rules])
    lora_models.draw(model, seed)
    return model


def save(model: nnx.Module, root: Path, *, only_pairs: bool = True) -> Path:
    """Writes a checkpoint; returns its root."""
    manager = CheckpointManager(str(root / "actor"))
    assert manager.save(5, model, save_only_lora_params=only_pairs, force=True)
    manager.close()
    return root


@ref.deprecations_ignored()
def logits(model: Any, prompt: np.ndarray) -> np.ndarray:
    """What Tunix's model computes of a prompt without a cache: float32 [L, V]."""
    length = len(prompt)
    mask = jnp.tril(jnp.ones((1, length, length), jnp.bool))
    run = nnx.jit(lambda model, *inputs: model(*inputs)[0])
    found = run(model, jnp.asarray(prompt)[None], jnp.arange(length)[None], None, mask)
    return np.asarray(found[0], np.float32)
