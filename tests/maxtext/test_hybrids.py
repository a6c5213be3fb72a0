"""GRPO on MaxText's Qwen3.5: it learns, and the engine's log-probs stay those of the trainer."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.maxtext import actors, recipe
from tests.maxtext.runs import watched
from tests.recipes.models import make_tokenizer
from tunix_sgljax import mismatch_report

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

QWEN3_5 = (
    "model_name=qwen3.5-35b-a3b",
    *recipe.HYBRID,
    "base_num_decoder_layers=4",
    "head_dim=16",
    "mrope_section=[1,1,0]",
    "scan_layers=True",
)


def test_twenty_steps_raise_the_reward():
    """Prompts fill their rows: behind padding, MaxText's nets compute something else."""
    tokenizer = make_tokenizer(names_pad=True)
    (length,) = {1 + len(tokenizer.encode(text)) for text in actors.PROMPTS}  # a begin token, too
    # On MaxText's own mesh, rules of its base.yml shard two axes of a net's kernel over one mesh
    # axis, which Tunix 0.1.7 refuses for the optimizer's state; those of its rl.yml do not.
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tensor"))
    actor = actors.make(*QWEN3_5, mesh=mesh)
    with pytest.MonkeyPatch.context() as patch, watched(patch) as run:
        cluster = actors.train(
            actor,
            20,
            0.01,
            prompt_length=length,
            sampling_params={"bad_token_ids": [actors.PAD_ID]},
        )
        report = mismatch_report(cluster.rollout, cluster.actor_trainer.model, actors.PROMPTS)
        assert cluster.rollout.weight_version == 20
    assert run.differing == [[]] * 20
    rewards = run.rewards[:20]  # the report's samples come behind them
    assert rewards[-5:].mean() > rewards[:5].mean() + 0.1, rewards
    assert report.overall.num_tokens > 20
    assert report.is_within(), str(report)
    assert report.padding is None
