"""LoRA on MaxText's actors: qwix's pairs on scanned and flat kernels, merged at each sync."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from sgljax_engine import InvalidConfigError
from tests.maxtext import actors
from tunix_sgljax import mismatch_report

pytestmark = pytest.mark.filterwarnings("ignore")

LORA = ("lora.enable_lora=True", "lora.lora_rank=4", "lora.lora_alpha=8.0")
SCANS = pytest.mark.parametrize("scan", [True, False], ids=["scanned", "flat"])
PROMPTS = ["say e, ann", "say e, bob and cem", "e"]


def with_random_pairs(actor):
    """B is zero at first, so that its place in the weight would not show."""
    state = nnx.state(actor.model, nnx.LoRAParam)
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(state))))
    drawn = jax.tree.map(lambda x: 0.2 * jax.random.normal(next(keys), x.shape, jnp.float32), state)
    nnx.update(actor.model, drawn)
    return actor


@SCANS
def test_the_rollout_computes_what_the_trainer_does(scan):
    actor = actors.make(*LORA, f"scan_layers={scan}")
    rollout = actors.make_rollout(actor)
    before = mismatch_report(rollout, actor.model, PROMPTS)
    assert before.is_within(), str(before)
    with_random_pairs(actor)
    rollout.update_params(nnx.state(actor.model, nnx.LoRAParam))
    after = mismatch_report(rollout, actor.model, PROMPTS)
    assert after.is_within(), str(after)
    assert after.overall.num_tokens > 20
    report = rollout.lora_report
    num_layers = 1 if scan else 3
    assert (report.num_pairs, report.max_rank) == (7 * num_layers, 4)
    assert {rule.scale for rule in rollout._builder.weights._lora.rules} == {2.0}
    rollout.close()


def test_adapters_beside_the_base_are_refused():
    actor = actors.make(*LORA)
    with pytest.raises(InvalidConfigError, match="lora='adapter' cannot serve"):
        actors.make_rollout(actor, lora="adapter")
