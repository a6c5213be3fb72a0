"""Small models of the recipes' families with random weights, and tokenizers of characters."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast
from tunix.models.gemma import model as gemma
from tunix.models.gemma3 import model as gemma3
from tunix.models.gemma4 import model as gemma4
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3
from tunix.rl import reshard

VOCAB_SIZE = 104
"""The characters and three special tokens, rounded up to what eight devices share."""

END_ID = 2
_CHARACTERS = ["\n", *map(chr, range(ord(" "), ord("~") + 1))]
_PAD, _BOS, _END = "<|pad|>", "<|bos|>", "<|end|>"
_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

_LLAMA_LIKE: dict[str, Any] = {
    "num_layers": 2,
    "vocab_size": VOCAB_SIZE,
    "embed_dim": 32,
    "hidden_dim": 64,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 8,
    "norm_eps": 1e-6,
    "rope_theta": 1_000_000,
}
_GEMMA_LIKE: dict[str, Any] = {
    "num_layers": 2,
    "num_embed": VOCAB_SIZE,
    "embed_dim": 32,
    "hidden_dim": 64,
    "num_heads": 8,
    "head_dim": 8,
}
_GEMMA1: dict[str, Any] = {
    **_GEMMA_LIKE,
    "final_logit_softcap": None,
    "use_post_attn_norm": False,
    "use_post_ffw_norm": False,
    "attention_types": (gemma.AttentionType.GLOBAL,) * 2,
}
_GEMMA3: dict[str, Any] = {
    **_GEMMA_LIKE,
    "sliding_window_size": 13,
    "global_base_frequency": 100_000,
    "param_dtype": jnp.float32,
}


_LOCAL, _GLOBAL = gemma4.AttentionType.LOCAL_SLIDING, gemma4.AttentionType.GLOBAL


class Model(NamedTuple):
    """A family in small.

    Attributes:
        model_class: Tunix's.
        config: Its configuration.
        end_bias: What gives the end token a probability of about a tenth at every place, so that
            most completions end in time: Tunix's agentic learner drops those that do not.
    """

    model_class: Any
    config: Any
    end_bias: float


MODELS = {
    "qwen3": Model(qwen3.Qwen3, qwen3.ModelConfig(**_LLAMA_LIKE, use_tied_embedding=True), 3.0),
    # As many kv heads as a mesh of (1, 8) has devices, as those recipes have.
    "qwen3_wide": Model(
        qwen3.Qwen3,
        qwen3.ModelConfig(**{**_LLAMA_LIKE, "num_heads": 16, "num_kv_heads": 8}),
        1.5,
    ),
    "qwen2": Model(qwen2.Qwen2, qwen2.ModelConfig(**_LLAMA_LIKE), 2.2),
    "llama3": Model(llama3.Llama3, llama3.ModelConfig(**_LLAMA_LIKE), 3.0),
    "llama3_tied": Model(llama3.Llama3, llama3.ModelConfig(**_LLAMA_LIKE, weight_tying=True), 3.0),
    "gemma_mqa": Model(gemma.Gemma, gemma.ModelConfig(**_GEMMA1, num_kv_heads=1), 0.6),
    "gemma_mha": Model(gemma.Gemma, gemma.ModelConfig(**_GEMMA1, num_kv_heads=8), 0.5),
    "gemma2": Model(
        gemma.Gemma,
        gemma.ModelConfig(
            **_GEMMA_LIKE,
            num_kv_heads=4,
            final_logit_softcap=30.0,
            attn_logits_soft_cap=50.0,
            use_post_attn_norm=True,
            use_post_ffw_norm=True,
            attention_types=(gemma.AttentionType.LOCAL_SLIDING, gemma.AttentionType.GLOBAL),
            sliding_window_size=64,
        ),
        1.7,
    ),
    "gemma3": Model(gemma3.Gemma3, gemma3.ModelConfig(**_GEMMA3, num_kv_heads=4), 1.5),
    "gemma3_mqa": Model(gemma3.Gemma3, gemma3.ModelConfig(**_GEMMA3, num_kv_heads=1), 1.4),
    "gemma4": Model(
        gemma4.Gemma4,
        gemma4.ModelConfig(
            **{**_GEMMA_LIKE, "num_layers": 4},
            num_kv_heads=1,
            final_logit_softcap=30.0,
            sliding_window_size=64,
            global_key_size=16,
            per_layer_input_dim=8,
            frac_shared_layers=0.5,
            override_kv_shared_ffw_hidden=128,
            attention_pattern=(_LOCAL, _GLOBAL),
        ),
        1.5,
    ),
}


def make_model(name: str, mesh: jax.sharding.Mesh, dtype: str = "float32", seed: int = 0) -> Any:
    """A model on a mesh, sharded as Tunix shards it.

    Args:
        name: A key of `MODELS`, or of `tests.maxtext.recipe_model.MODELS`, which MaxText makes.
        mesh: With axes of the model's trainer.
        dtype: What it computes in; weights are float32.
        seed: Of the weights.
    """
    if name.startswith("maxtext_"):
        from tests.maxtext import recipe_model

        return recipe_model.make(name, mesh, dtype, seed)
    model_class, config, end_bias = MODELS[name]
    common = np.full(config.embed_dim, config.embed_dim**-0.5)
    if dtype != "float32":
        config = dataclasses.replace(config, dtype=jnp.dtype(dtype))
    model = model_class(config, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(seed)
    state = nnx.state(model, nnx.Param)

    def draw(path: Any, leaf: jax.Array) -> jax.Array:
        if leaf.ndim < 2:  # scales of norms, and biases
            return leaf
        array = 0.1 * rng.standard_normal(leaf.shape)
        name = jax.tree_util.keystr(path)
        # All inputs have a direction in common, and so the last hidden states; the end token is
        # likelier for having more of it.
        if "input_embedding" in name and "per_layer" not in name:
            array += common
            array[END_ID] += end_bias * common
        elif "lm_head" in name:
            array[:, END_ID] += end_bias * common
        return jnp.asarray(array, leaf.dtype)

    nnx.update(model, jax.tree_util.tree_map_with_path(draw, state))
    return reshard.reshard_model_to_mesh(model, mesh)


def make_critic(mesh: jax.sharding.Mesh) -> Any:
    """A value model for any actor: Tunix 0.1.7 cannot make one of a Gemma or a Llama."""
    critic = make_model("qwen3_wide", mesh, seed=1)
    critic.lm_head = nnx.Linear(critic.config.embed_dim, 1, use_bias=False, rngs=nnx.Rngs(1))
    return critic


def make_tokenizer(*, names_pad: bool) -> PreTrainedTokenizerFast:
    """A token for each character.

    Args:
        names_pad: Whether it names a padding token; without, Tunix pads with the end token.
    """
    vocab = {token: i for i, token in enumerate([_PAD, _BOS, _END, *_CHARACTERS])}
    assert len(vocab) <= VOCAB_SIZE
    fast = FastTokenizer(models.WordLevel(vocab))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    fast.decoder = decoders.Fuse()
    special = {"bos_token": _BOS, "eos_token": _END} | ({"pad_token": _PAD} if names_pad else {})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, **special)
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def write_tokenizer(folder: Path, *, names_pad: bool) -> Path:
    """Writes a tokenizer's files, and returns the folder."""
    make_tokenizer(names_pad=names_pad).save_pretrained(folder)
    return folder
