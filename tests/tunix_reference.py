"""What Tunix itself computes: its Qwen3, its vanilla sampler, its trainer's log-probs.

The reference that the adapter's tests are held against. Nothing here imports the engine.

Two limits of Tunix 0.1.7 are refused, not hidden: its Qwen3 ignores `rope_theta` and always uses
1e6, and both its sampler and its trainer mask out every token that equals the pad id, wherever it
stands.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.rl.common import compute_per_token_logps

PAD_ID = 0
NO_EOS_ID = -1
ROPE_THETA = 1_000_000
PAD_LOGIT_SCALE = 0.1

_SHARED = {"vocab_size": 128, "num_layers": 2, "norm_eps": 1e-6, "rope_theta": ROPE_THETA}
CONFIGS: dict[str, dict[str, Any]] = {
    "gqa2_tied": {
        **_SHARED,
        "embed_dim": 64,
        "hidden_dim": 96,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "use_tied_embedding": True,
    },
    "gqa4_untied": {
        **_SHARED,
        "embed_dim": 32,
        "hidden_dim": 80,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 16,
        "use_tied_embedding": False,
    },
    "mha_tied": {
        **_SHARED,
        "embed_dim": 48,
        "hidden_dim": 64,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 12,
        "use_tied_embedding": True,
    },
    "mha_untied": {
        **_SHARED,
        "embed_dim": 48,
        "hidden_dim": 64,
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 32,
        "use_tied_embedding": False,
    },
}
"""Keywords of Tunix's `ModelConfig` by name; the number is query heads to a KV head."""

ROBUST_SEEDS = {"gqa2_tied": 8, "gqa4_untied": 2, "mha_tied": 5, "mha_untied": 10}
"""Weight seeds whose 64 greedy tokens after each of `make_prompts` leave a gap of at least 4e-3
between the two best logits and do not fall into a short cycle."""


class IntegerTokenizer:
    """A tokenizer whose text is its ids: "5 17 3" encodes to [5, 17, 3].

    Pad and BOS are both 0: Tunix's sampler prepends no BOS when its id is 0. EOS is no token at
    all, so that nothing stops early.
    """

    def encode(self, text: str) -> list[int]:
        """Returns the ids that `text` lists."""
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns `ids` as text."""
        return " ".join(str(token_id) for token_id in ids)

    def bos_id(self) -> int:
        """Returns 0: none is prepended."""
        return PAD_ID

    def eos_id(self) -> int:
        """Returns an id that no model produces."""
        return NO_EOS_ID

    def pad_id(self) -> int:
        """Returns 0."""
        return PAD_ID


@contextlib.contextmanager
def deprecations_ignored() -> Iterator[None]:
    """Lets Tunix use the old names of JAX and Flax where warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def make_prompts(
    vocab_size: int, lengths: Sequence[int] = (1, 5, 16, 17, 40), seed: int = 0
) -> list[np.ndarray]:
    """Draws ragged prompts, int32[length] each, without the pad id."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, vocab_size, length).astype(np.int32) for length in lengths]


@deprecations_ignored()
def make_tunix_qwen3(config: str | Mapping[str, Any], seed: int | None = None) -> Qwen3:
    """Builds a float32 Qwen3 with random weights whose logits are well spread.

    Every parameter is overwritten: Tunix initialises MLP kernels to zero and embeddings so small
    that all logits are nearly equal. The logit of the pad token stays near 0, so that greedy
    decoding does not choose it.

    Args:
        config: A name in `CONFIGS`, or the keywords of Tunix's `ModelConfig`.
        seed: Of the weights. None is the one in `ROBUST_SEEDS` for a named config, else 0.

    Returns:
        The model.

    Raises:
        ValueError: For a `rope_theta` other than the one that Tunix's model always uses, or for
            a mixture of experts.
    """
    if seed is None:
        seed = ROBUST_SEEDS[config] if isinstance(config, str) else 0
    model_config = ModelConfig(**(CONFIGS[config] if isinstance(config, str) else config))
    if model_config.rope_theta != ROPE_THETA:
        raise ValueError(
            f"rope_theta is {model_config.rope_theta}, but Tunix's Qwen3 always uses {ROPE_THETA}"
        )
    if model_config.num_experts is not None:
        raise ValueError(f"num_experts is {model_config.num_experts}; only dense models here")
    rng = np.random.default_rng(seed)
    return with_weights(
        lambda: Qwen3(model_config, rngs=nnx.Rngs(0)),
        lambda path, leaf: _random_weight(path, leaf.shape, rng),
    )


@deprecations_ignored()
def with_weights(
    make: Callable[[], nnx.Module], draw: Callable[[str, jax.ShapeDtypeStruct], Any]
) -> Any:
    """A model with the given weights, and none of Tunix's own, which take a program a shape.

    Args:
        make: Makes the model; it is traced, never run.
        draw: The array of a parameter, given its path and what it must be; any dtype.
    """
    model = nnx.eval_shape(make)
    state = nnx.state(model, nnx.Param)
    new = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.asarray(draw(jax.tree_util.keystr(path), leaf), leaf.dtype), state
    )
    nnx.update(model, new)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(nnx.state(model)))
    return model


def _random_weight(path: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draws one parameter, [*shape], by its place in Tunix's model."""
    noise = rng.standard_normal(shape)
    if "norm" in path:
        return 1.0 + 0.25 * noise
    if "embedder" in path:  # [V, D]: the head too, when tied
        weight = 3.0 * noise / shape[1] ** 0.5
        weight[PAD_ID] *= PAD_LOGIT_SCALE
        return weight
    if "lm_head" in path:  # [D, V]
        weight = 3.0 * noise / shape[0] ** 0.5
        weight[:, PAD_ID] *= PAD_LOGIT_SCALE
        return weight
    fan_in = shape[0] * shape[1] if "o_proj" in path else shape[0]  # o_proj is [N, H, D]
    return 2.0 * noise / fan_in**0.5


@deprecations_ignored()
def vanilla_greedy(
    model: Qwen3, prompts_ids: Sequence[Sequence[int] | np.ndarray], max_new_tokens: int
) -> list[np.ndarray]:
    """Decodes greedily with Tunix's vanilla sampler, all prompts in one left-padded batch.

    Args:
        model: The policy.
        prompts_ids: Token ids of each prompt, ragged, without pad ids.
        max_new_tokens: How many tokens each continuation has, exactly.

    Returns:
        int32[max_new_tokens] for each prompt.

    Raises:
        ValueError: For a prompt that is empty or holds the pad id, or when the model chose the
            pad id, which the sampler then hides from later steps.
    """
    prompts = [_checked("prompt", ids, PAD_ID) for ids in prompts_ids]
    tokenizer = IntegerTokenizer()
    longest = max(len(ids) for ids in prompts)
    config = model.config
    sampler = Sampler(
        model,
        tokenizer,
        CacheConfig(
            cache_size=longest + max_new_tokens,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        ),
    )
    output = sampler(
        [tokenizer.decode(ids.tolist()) for ids in prompts],
        max_generation_steps=max_new_tokens,
        max_prompt_length=longest,
        temperature=0.0,
        top_p=None,  # what makes it greedy
    )
    tokens = [np.asarray(row, np.int32) for row in output.tokens]
    for row in tokens:
        if row.shape != (max_new_tokens,) or (row == PAD_ID).any():
            raise ValueError(f"greedy decoding chose the pad id {PAD_ID}: {row}")
    return tokens


@deprecations_ignored()
def trainer_logps(
    model: Qwen3,
    prompts: Sequence[Sequence[int] | np.ndarray],
    completions: Sequence[Sequence[int] | np.ndarray],
    pad_id: int = PAD_ID,
    temperature: float = 1.0,
) -> list[np.ndarray]:
    """Scores completions as Tunix's trainer does, in one padded batch.

    Its sizes are rounded up, so that few programs do: rows, completions, and prompts unless all
    have one length, since Tunix's Gemma 2 depends on padding in front of them.

    Args:
        model: The policy.
        prompts: Token ids of each prompt, ragged; padded on the left here.
        completions: Token ids of each completion, ragged; padded on the right here.
        pad_id: In no prompt and no completion.
        temperature: Divides the logits; Tunix leaves them alone at 0.

    Returns:
        float32[len(completion)] log-probs for each row.

    Raises:
        ValueError: For rows that are empty or hold the pad id, or lists of unequal length.
    """
    rows = [
        (_checked("prompt", prompt, pad_id), _checked("completion", completion, pad_id))
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    lengths = {len(prompt) for prompt, _ in rows}
    width = max(lengths) if len(lengths) == 1 else _round_up(max(lengths), 16)
    num_rows = _round_up(len(rows), 4)
    prompt_ids = np.full((num_rows, width), pad_id, np.int32)
    num_tokens = _round_up(max(len(completion) for _, completion in rows), 32)
    completion_ids = np.full((num_rows, num_tokens), pad_id, np.int32)
    for i, (prompt, completion) in enumerate(itertools.islice(itertools.cycle(rows), num_rows)):
        prompt_ids[i, -len(prompt) :] = prompt
        completion_ids[i, : len(completion)] = completion
    graphdef, state = nnx.split(model)
    logps = compute_per_token_logps(
        graphdef,
        state,
        jnp.asarray(prompt_ids),
        jnp.asarray(completion_ids),
        pad_id=pad_id,
        eos_id=NO_EOS_ID,
        temperature=temperature,
    )
    logps_np = np.asarray(logps, np.float32)[: len(rows)]
    return [row[: len(completion)] for row, (_, completion) in zip(logps_np, rows, strict=True)]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _checked(what: str, ids: Sequence[int] | np.ndarray, pad_id: int) -> np.ndarray:
    """Returns `ids` as int32[L], or raises ValueError where Tunix would mask some of them."""
    array = np.asarray(ids, np.int32)
    if array.ndim != 1 or not array.size or (array == pad_id).any():
        raise ValueError(f"a {what} must be ids without the pad id {pad_id}, not {array}")
    return array
