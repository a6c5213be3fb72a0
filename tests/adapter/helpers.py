"""What the adapter's tests share: configs, texts, tokenizers, small checks on rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl.rollout.base_rollout import RolloutConfig

from tests import quick_compile
from tests import tunix_reference as ref
from tests.geometry import SMALL
from tunix_sgljax import SglJaxRollout

quick_compile.others_quickly()  # in child processes too, which have no conftest

MODEL = "gqa2_tied"
"""The configuration of `tunix_reference` that most tests use."""

VOCAB_SIZE = ref.CONFIGS[MODEL]["vocab_size"]


class EndingTokenizer(ref.IntegerTokenizer):
    """An integer tokenizer with special tokens of one's choice."""

    def __init__(self, *, eos: int | None, pad: int | None = ref.PAD_ID, bos: int | None = 0):
        self._eos, self._pad, self._bos = eos, pad, bos

    def bos_id(self) -> Any:
        return self._bos

    def eos_id(self) -> Any:
        return self._eos

    def pad_id(self) -> Any:
        return self._pad


def text_of(ids: Sequence[int] | np.ndarray) -> str:
    """A prompt that the integer tokenizer encodes to `ids`."""
    return " ".join(str(int(token)) for token in ids)


def rollout_config(**changes: Any) -> RolloutConfig:
    """Greedy, 16 tokens, never ending early; the KV cache and context stay small."""
    fields: dict[str, Any] = {
        "max_tokens_to_generate": 16,
        "temperature": 0.0,
        "max_prompt_length": 16,
        "kv_cache_size": 128,
        "eos_tokens": [],
    }
    return RolloutConfig(**(fields | changes))


def new_rollout(model: nnx.Module, **arguments: Any) -> SglJaxRollout:
    """A rollout of the model; the caller closes it."""
    merged: dict[str, Any] = {
        "tokenizer": ref.IntegerTokenizer(),
        "rollout_config": rollout_config(),
        **SMALL,
        **arguments,
    }
    return SglJaxRollout(rollout_actor=model, **merged)


def tokens_of(rollout: SglJaxRollout, prompts: Sequence[Any], **changes: Any) -> list[list[int]]:
    """Generated tokens as lists, for prompts given as token ids."""
    texts = [text_of(ids) for ids in prompts]
    output = rollout.generate(texts, rollout_config(**changes))
    return [row.tolist() for row in output.tokens]


def params_of(model: nnx.Module) -> nnx.State:
    """What Tunix hands to `update_params`."""
    return nnx.state(model, (nnx.Param,))


def named_params(model: nnx.Module) -> dict[str, jax.Array]:
    """The parameters of a Tunix model by their dotted names."""
    return named_params_of(params_of(model))


def named_params_of(state: nnx.State) -> dict[str, jax.Array]:
    """The arrays of a state by their dotted names."""
    return {
        ".".join(str(key.key) for key in path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(state))[0]
    }


def padded(
    rows: Sequence[Sequence[int] | np.ndarray], width: int, *, left: bool, pad: int = ref.PAD_ID
) -> np.ndarray:
    """Rows padded to int32 [B, width] on one side."""
    out = np.full((len(rows), width), pad, np.int32)
    for i, row in enumerate(rows):
        out[i, slice(width - len(row), None) if left else slice(len(row))] = row
    return out


def scores(
    rollout: SglJaxRollout, prompts: Sequence[Any], completions: Sequence[Any]
) -> list[np.ndarray]:
    """`get_per_token_logps` of ragged rows, through the padded arrays that Tunix hands over."""
    prompt_ids = jnp.asarray(padded(prompts, 4 + max(map(len, prompts)), left=True))
    completion_ids = jnp.asarray(padded(completions, 4 + max(map(len, completions)), left=False))
    logps = rollout.get_per_token_logps(prompt_ids, completion_ids)
    assert isinstance(logps, jax.Array)
    assert (logps.shape, logps.dtype) == (completion_ids.shape, np.float32)
    rows = np.asarray(logps)
    assert not rows[np.asarray(completion_ids) == ref.PAD_ID].any()
    return [row[: len(ids)] for row, ids in zip(rows, completions, strict=True)]


def max_difference(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> float:
    """The largest absolute difference between two lists of arrays of equal lengths."""
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))
