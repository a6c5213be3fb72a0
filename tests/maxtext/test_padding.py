"""MaxText's fault with padding in front of a prompt, in its own model, and who names it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tunix.rl.rollout.base_rollout import RolloutOutput

from tests.maxtext import actors, recipe
from tests.maxtext.actors import PAD_ID
from tests.recipes.models import END_ID
from tunix_sgljax import mismatch_report, padding
from tunix_sgljax.exactness.trainer_match import trainer_logps

pytestmark = pytest.mark.filterwarnings("ignore")

QWEN3_NEXT = ("model_name=qwen3-next-80b-a3b", *recipe.HYBRID)
LENGTHS = (9, 5)
NUM_TOKENS = 8


class UnpaddedRollout:
    """What a rollout on unpadded tokens computes: the trainer's log-probs, row by row.

    Has what `mismatch_report` uses of a rollout.
    """

    dtype = kv_dtype = "float32"
    logprobs_mode = "trainer_logprobs"
    rollout_config = actors.rollout_config(max_tokens_to_generate=NUM_TOKENS)

    def __init__(self, model: Any) -> None:
        self.graphdef, self.state = nnx.split(model)
        rng = np.random.default_rng(0)
        self.prompts = [rng.integers(5, 100, size).tolist() for size in LENGTHS]
        self.tokens = rng.integers(5, 100, (len(LENGTHS), NUM_TOKENS)).astype(np.int32)

    def check_comparable(self, config: Any) -> None:
        """Every config is."""

    def pad_id(self) -> int:
        return PAD_ID

    def eos_id(self) -> int:
        return END_ID

    def score(self, prompts_BP: np.ndarray, tokens_BC: np.ndarray) -> np.ndarray:
        ids = {"pad_id": PAD_ID, "eos_id": END_ID, "temperature": 1.0}
        return trainer_logps(self.graphdef, self.state, prompts_BP, tokens_BC, **ids)

    def generate(self, prompts: list[str], config: Any) -> Any:
        del prompts, config
        alone = [
            self.score(np.asarray([ids], np.int32), tokens[None])[0]
            for ids, tokens in zip(self.prompts, self.tokens, strict=True)
        ]
        output: Any = RolloutOutput(
            text=[""] * len(LENGTHS),
            logits=[],
            tokens=list(self.tokens),
            left_padded_prompt_tokens=padding.left_pad_prompts(self.prompts, max(LENGTHS), PAD_ID),
            logprobs=alone,
        )
        output.weight_versions = [np.zeros(NUM_TOKENS, np.int32)] * len(LENGTHS)
        return output


def drawn(actor):
    """Weights with which attention and convolutions matter."""
    state = nnx.state(actor.model, nnx.Param)
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(state))))
    nnx.update(
        actor.model,
        jax.tree.map(
            lambda x: x + 0.2 * jax.random.normal(next(keys), x.shape, jnp.float32), state
        ),
    )
    return actor


@pytest.mark.parametrize("words", [QWEN3_NEXT, ()], ids=["qwen3_next", "qwen3"])
def test_padding_is_named_where_it_enters(words):
    rollout: Any = UnpaddedRollout(drawn(actors.make(*words)).model)
    model = nnx.merge(rollout.graphdef, rollout.state)
    report = mismatch_report(rollout, model, ["a", "b"])
    if not words:
        assert report.is_within(), str(report)
        return
    assert sorted(report.rows_off()) == [1]  # the first row has no padding
    assert report.padding is not None
    assert report.padding.with_padding > 0.1 > 1e-3 > report.padding.without
    assert "convolution of its gated delta nets" in report.padding.fault
    assert "padding" in str(report)
