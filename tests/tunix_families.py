"""Small models of every family that Tunix trains and the rollout supports, beside Qwen3.

Dense Qwen3 itself is in `tunix_reference`, whose sampler and trainer serve these models too.
Nothing here imports the engine.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.models.gemma import model as gemma
from tunix.models.gemma3 import model as gemma3
from tunix.models.gemma4 import model as gemma4
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3

from tests import tunix_reference as ref

_LLAMA_LIKE: dict[str, Any] = {
    "num_layers": 2,
    "vocab_size": 96,
    "embed_dim": 32,
    "hidden_dim": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "norm_eps": 1e-5,
}
_GEMMA_LIKE: dict[str, Any] = {
    "num_layers": 2,
    "num_embed": 96,
    "embed_dim": 32,
    "hidden_dim": 48,
    "num_heads": 4,
    "head_dim": 16,
}
_GEMMA1: dict[str, Any] = {
    **_GEMMA_LIKE,
    "final_logit_softcap": None,
    "use_post_attn_norm": False,
    "use_post_ffw_norm": False,
    "attention_types": (gemma.AttentionType.GLOBAL,) * 2,
}


_GEMMA4: dict[str, Any] = {
    **_GEMMA_LIKE,
    "final_logit_softcap": 16.0,
    "sliding_window_size": 13,
    "global_base_frequency": 100_000,
}
_LOCAL, _GLOBAL = gemma4.AttentionType.LOCAL_SLIDING, gemma4.AttentionType.GLOBAL


class Family(NamedTuple):
    """A tiny model.

    Attributes:
        model: Tunix's class.
        config: Its configuration.
        seed: Of weights whose 64 greedy tokens after each prompt leave a gap of at least 4e-3
            between the two best logits and do not fall into a short cycle.
        prompt_lengths: Of the prompts; all the same where Tunix depends on padding.
    """

    model: Any
    config: Any
    seed: int
    prompt_lengths: tuple[int, ...] = (1, 5, 16, 17, 40)


FAMILIES = {
    "qwen2_tied": Family(
        qwen2.Qwen2,
        qwen2.ModelConfig(**_LLAMA_LIKE, rope_theta=30_000, use_tied_embedding=True),
        seed=6,
    ),
    "qwen2_untied": Family(
        qwen2.Qwen2, qwen2.ModelConfig(**_LLAMA_LIKE, rope_theta=1_000_000), seed=4
    ),
    "llama3_tied": Family(
        llama3.Llama3,
        llama3.ModelConfig(**_LLAMA_LIKE, rope_theta=500_000, weight_tying=True),
        seed=0,
    ),
    "llama3_untied": Family(
        llama3.Llama3, llama3.ModelConfig(**_LLAMA_LIKE, rope_theta=500_000), seed=0
    ),
    "qwen3_moe": Family(
        qwen3.Qwen3,
        qwen3.ModelConfig(
            **_LLAMA_LIKE, rope_theta=1_000_000, num_experts=6, num_experts_per_tok=3
        ),
        seed=3,
    ),
    # The three forms of Gemma's projections: q and kv, all in one, q and kv of several heads.
    "gemma_mqa": Family(gemma.Gemma, gemma.ModelConfig(**_GEMMA1, num_kv_heads=1), seed=0),
    "gemma_mha": Family(gemma.Gemma, gemma.ModelConfig(**_GEMMA1, num_kv_heads=4), seed=6),
    # Tunix 0.1.7 compares positions with places in the padded row, so that the window of a
    # Gemma 2 moves with the padding; without padding it is right.
    "gemma2": Family(
        gemma.Gemma,
        gemma.ModelConfig(
            **{**_GEMMA_LIKE, "num_layers": 3},
            num_kv_heads=2,
            final_logit_softcap=16.0,
            use_post_attn_norm=True,
            use_post_ffw_norm=True,
            attention_types=(
                gemma.AttentionType.LOCAL_SLIDING,
                gemma.AttentionType.GLOBAL,
                gemma.AttentionType.LOCAL_SLIDING,
            ),
            attn_logits_soft_cap=4.0,
            sliding_window_size=13,
        ),
        seed=4,
        prompt_lengths=(20, 20, 20, 20, 20),
    ),
    # Six layers, for the sixth is the first with full attention.
    "gemma3": Family(
        gemma3.Gemma3,
        gemma3.ModelConfig(
            **{**_GEMMA_LIKE, "num_layers": 6},
            num_kv_heads=1,
            sliding_window_size=13,
            local_base_frequency=10_000,
            global_base_frequency=100_000,
            global_scale_factor=4.0,
            query_pre_attn_norm=(
                gemma3.QueryPreAttentionNormalisation.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS
            ),
            param_dtype=jnp.float32,
        ),
        seed=3,
    ),
    # As E2B: the last layers read the keys of the second and third, with wider MLPs.
    "gemma4_shared_keys": Family(
        gemma4.Gemma4,
        gemma4.ModelConfig(
            **{**_GEMMA4, "num_layers": 5},
            num_kv_heads=1,
            global_key_size=32,
            per_layer_input_dim=8,
            frac_shared_layers=0.4,
            override_kv_shared_ffw_hidden=96,
            attention_pattern=(_LOCAL, _LOCAL, _GLOBAL, _LOCAL, _GLOBAL),
        ),
        seed=0,
    ),
    # As 26B-A4B: experts beside the MLP.
    "gemma4_moe": Family(
        gemma4.Gemma4,
        gemma4.ModelConfig(
            **{**_GEMMA4, "num_layers": 3},
            num_kv_heads=2,
            num_global_kv_heads=1,
            global_key_size=32,
            k_eq_v_global=True,
            attention_pattern=(_LOCAL, _LOCAL, _GLOBAL),
            enable_moe=True,
            num_experts=6,
            num_experts_per_tok=2,
            expert_dim=20,
        ),
        seed=0,
    ),
    # As 31B: the keys of global layers are their values.
    "gemma4_keys_as_values": Family(
        gemma4.Gemma4,
        gemma4.ModelConfig(
            **{**_GEMMA4, "num_layers": 3, "num_heads": 6},
            num_kv_heads=3,
            num_global_kv_heads=1,
            global_key_size=32,
            k_eq_v_global=True,
            attention_pattern=(_LOCAL, _LOCAL, _GLOBAL),
        ),
        seed=0,
    ),
}


def make(name: str, seed: int | None = None) -> Any:
    """Builds a float32 model with random weights whose logits are well spread.

    Args:
        name: A key of `FAMILIES`.
        seed: Of the weights; None is the family's.
    """
    family = FAMILIES[name]
    rng = np.random.default_rng(family.seed if seed is None else seed)
    return ref.with_weights(
        lambda: family.model(family.config, rngs=nnx.Rngs(0)),
        lambda path, leaf: _draw(name, rng, path, leaf.shape),
    )


def make_prompts(name: str) -> list[np.ndarray]:
    """Prompts of the family's lengths."""
    return ref.make_prompts(_LLAMA_LIKE["vocab_size"], FAMILIES[name].prompt_lengths)


def _draw(family: str, rng: np.random.Generator, path: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draws one parameter by its place in Tunix's model."""
    noise = rng.standard_normal(shape)
    if "norm" in path:
        if "scale" not in path:
            return 1.0 + 0.25 * noise
        # Gemma's embeddings are large, as they are scaled: large outputs of the layers, too, keep
        # the model from repeating its last token.
        is_post_norm = "post_" in path
        whole = 0.0
        if family.startswith("gemma4"):
            # Its products are not scaled: larger ones would amplify rounding errors.
            whole = 0.4 if "query" in path or "key_norm" in path else 1.0
        if is_post_norm and "per_layer" in path:
            return 3.0 + 0.25 * noise
        return (12.0 if is_post_norm else whole) + 0.25 * noise
    if "skip_scale" in path:
        return 0.8 + 0.1 * noise
    if "router_scale" in path or "per_expert_scale" in path:
        return 1.0 + 0.5 * noise
    if "gating_einsum" in path:  # [E, 2, F, D]
        return 2.0 * noise / shape[-1] ** 0.5
    if "moe" in path and "linear" in path:  # [E, F, D]
        return 2.0 * noise / shape[-2] ** 0.5
    if "bias" in path:
        return noise
    if "embedder" in path:
        weight = 3.0 * noise / shape[1] ** 0.5
        weight[ref.PAD_ID] *= ref.PAD_LOGIT_SCALE
        return weight
    if "lm_head" in path:
        weight = 3.0 * noise / shape[0] ** 0.5
        weight[:, ref.PAD_ID] *= ref.PAD_LOGIT_SCALE
        return weight
    if len(shape) == 3 and "mlp" in path:  # experts: [E, in, out]
        fan_in = shape[1]
    elif "o_proj" in path or "attn_vec_einsum" in path:  # [N, H, D]
        fan_in = shape[0] * shape[1]
    else:  # [D, ...], or Gemma's [..., N, D, H]
        fan_in = shape[-2] if "einsum" in path else shape[0]
    gain = 10.0 if "down_proj" in path and family.startswith("gemma_") else 2.0
    return gain * noise / fan_in**0.5
