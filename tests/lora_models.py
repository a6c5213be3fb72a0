"""LoRA actors as Tunix's recipes make them, with qwix, and what they compute without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx
from tunix.rl.common import compute_per_token_logps

from tests import tunix_families as families
from tests import tunix_reference as ref

RULES: dict[str, tuple[dict[str, Any], ...]] = {
    "all": ({"module_path": ".*(attn|mlp|lm_head|per_layer).*", "rank": 4, "alpha": 8.0},),
    "mlp": ({"module_path": ".*mlp.*", "rank": 2, "alpha": 2.0},),
    "two": (
        {"module_path": ".*attn.*", "rank": 3, "alpha": 1.5},
        {"module_path": ".*(gate|down)_proj", "rank": 5, "alpha": 4.0},
    ),
}
"""Rules of a provider, by name: all projections; MLPs alone, as in Tunix's PPO recipe for Qwen3;
and two with a rank and an alpha each. (".*" itself fails in qwix where embeddings are tied.)"""

MODELS = (
    "gqa2_tied",
    "gqa4_untied",
    "llama3_untied",
    "gemma_mha",
    "gemma2",
    "gemma3",
    "gemma4_shared_keys",
    "gemma4_keys_as_values",
)
"""Qwen3, tied and not; Llama 3; Gemma with one fused projection, and with two; Gemma 4 with further
projections of each layer, and with keys that are values."""

WITH_EXPERTS = ("qwen3_moe", ({"module_path": ".*(attn|router).*", "rank": 4, "alpha": 8.0},))
"""A model with experts and its rules: qwix 0.1.8 fails in Tunix's trainer where rules name experts,
whose stacks it takes for one weight."""


def make(name: str, rules: str | Sequence[dict[str, Any]] = "all", **quantised: Any) -> Any:
    """A model with pairs that change nothing yet: qwix draws A and leaves B at 0.

    Args:
        name: One of `MODELS`, or another one of `tunix_reference` or `tunix_families`.
        rules: A key of `RULES`, or keywords of `qwix.LoraRule`s.
        **quantised: More keywords of every rule: `weight_qtype="int8"` for QLoRA.
    """
    base = ref.make_tunix_qwen3(name) if name in ref.CONFIGS else families.make(name)
    given = RULES[rules] if isinstance(rules, str) else rules
    return add_pairs(base, [{**rule, **quantised} for rule in given])


@ref.deprecations_ignored()
def add_pairs(base: nnx.Module, rules: Sequence[dict[str, Any]]) -> Any:
    """A model with pairs beside the arrays of another one, A drawn and B 0 as by qwix.

    qwix runs the model to find where they go. That is traced alone, since it takes a program for
    each operation; but a base that it is to quantise needs to be run.

    Args:
        base: The model, which stays as it is.
        rules: Keywords of `qwix.LoraRule`s.
    """

    def apply(base: Any) -> Any:
        provider = qwix.LoraProvider([qwix.LoraRule(**rule) for rule in rules])
        inputs = base.get_model_input()
        return qwix.apply_lora_to_model(base, provider, **inputs, rngs=nnx.Rngs(0))

    if any("weight_qtype" in rule for rule in rules):
        return apply(base)
    model = nnx.eval_shape(apply, base)
    kept = dict(jax.tree_util.tree_flatten_with_path(nnx.state(base, nnx.Param))[0])
    rng = np.random.default_rng(0)

    def fill(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if path in kept:
            return kept[path]
        limit = (6 / np.prod(leaf.shape[:-1])) ** 0.5 if "lora_a" in str(path) else 0.0
        return jnp.asarray(rng.uniform(-limit, limit, leaf.shape), leaf.dtype)

    nnx.update(model, jax.tree_util.tree_map_with_path(fill, nnx.state(model, nnx.Param)))
    return model


def draw(model: nnx.Module, seed: int, size: float = 0.15) -> nnx.State:
    """Gives all pairs other values, as a step of training does; returns what Tunix would sync."""
    rng = np.random.default_rng(seed)

    def new(x: jax.Array) -> jax.Array:
        return jnp.asarray(size * rng.standard_normal(x.shape), x.dtype)

    nnx.update(model, jax.tree.map(new, leaves(model)))
    return leaves(model)


def leaves(model: nnx.Module) -> nnx.State:
    """What `RLCluster.sync_weights` hands over for a LoRA actor."""
    return nnx.state(model, (nnx.LoRAParam,))


def regrets(
    model: nnx.Module, prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray]
) -> np.ndarray:
    """How much the model's best logit beats that of each token, without any cache.

    Greedy tokens have 0, but for rounding where two logits are nearly equal. All prompts, and all
    completions, must have one length. float32 [B, C].
    """
    tokens = np.stack(completions)
    logits = np.asarray(_logits(model, jnp.asarray(np.stack(prompts)), jnp.asarray(tokens)))
    chosen = np.take_along_axis(logits, tokens[..., None], -1)[..., 0]
    return logits.max(-1) - chosen


@ref.deprecations_ignored()
def _logits(model: nnx.Module, prompts_BP: jax.Array, completions_BC: jax.Array) -> jax.Array:
    """Before each token of the completions: [B, C, V]. One program, not one an operation."""
    _, logits = compute_per_token_logps(
        *nnx.split(model),
        prompts_BP,
        completions_BC,
        pad_id=ref.PAD_ID,
        eos_id=ref.NO_EOS_ID,
        return_logits=True,
    )
    return logits
