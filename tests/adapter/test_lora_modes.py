"""How lora="auto" applies the pairs, and what of small updates reaches the rollout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import lora_models
from tests import tunix_reference as ref
from tests.adapter.helpers import new_rollout, rollout_config, scores, text_of
from tests.adapter.test_mappings import HF_NAMES
from tunix_sgljax import mismatch_report

PROMPTS = ref.make_prompts(90, (7, 5, 6, 7), seed=3)
COMPLETIONS = ref.make_prompts(90, (8, 8, 6, 7), seed=4)
RULE = {"module_path": ".*(attn|mlp).*", "rank": 4, "alpha": 8.0}

# Warnings of Tunix's model while its dtype is read.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def lora_model(dtype):
    shape = {**ref.CONFIGS["gqa2_tied"], "dtype": dtype, "param_dtype": dtype}
    return lora_models.add_pairs(ref.make_tunix_qwen3(shape, seed=3), [RULE])


@pytest.mark.parametrize(
    ("stored", "options", "mode"),
    [
        (jnp.float32, {}, "merged"),
        (jnp.float32, {"dtype": "bfloat16"}, "adapter"),
        (jnp.float32, {"quantization": "int8"}, "adapter"),
        (jnp.bfloat16, {}, "adapter"),
        (jnp.bfloat16, {"dtype": "float32"}, "merged"),
        (jnp.bfloat16, {"lora": "merged"}, "merged"),
    ],
)
def test_pairs_are_merged_where_that_rounds_nothing_away(caplog, stored, options, mode):
    rollout = new_rollout(lora_model(stored), **options)
    assert rollout.lora_report is not None
    assert rollout.lora_report.mode == mode
    assert "lora=" not in caplog.text
    rollout.close()


def test_slots_that_are_for_other_adapters_are_left_to_them(caplog):
    rollout = new_rollout(lora_model(jnp.bfloat16), max_loras=1)
    assert rollout.adapter is None
    assert "max_loras=1 asks for slots of other adapters" in caplog.text
    rollout.close()


def rescaled(model, size):
    """The pairs with all B drawn at a size, as after a few small steps."""
    rng = np.random.default_rng(5)

    def new(path, x):
        if "lora_b" not in str(path):
            return x
        return jnp.asarray(size * rng.standard_normal(x.shape), x.dtype)

    nnx.update(model, jax.tree_util.tree_map_with_path(new, lora_models.leaves(model)))
    return lora_models.leaves(model)


def exact_logps(model):
    """Tunix's log-probs of the model's values, computed in float32."""
    exact = lora_model(jnp.float32)
    nnx.update(exact, jax.tree.map(lambda x: x.astype(jnp.float32), nnx.state(model, nnx.Param)))
    return np.concatenate(ref.trainer_logps(exact, PROMPTS, COMPLETIONS, temperature=1.0))


@pytest.mark.slow
def test_pairs_that_cannot_be_kept_apart_are_merged_by_name(caplog):
    """Here a hook of the user's mapping changes a weight that has a pair."""
    hooks = {"layers.*.mlp.down_proj.kernel": lambda weight: 2 * weight}
    mapping = {"to_hf_mappings": HF_NAMES, "to_hf_hook_fns": hooks}
    config = rollout_config(rollout_mapping_config=mapping)
    rollout = new_rollout(lora_model(jnp.bfloat16), rollout_config=config)
    assert rollout.adapter == "policy"
    rollout.engine  # noqa: B018
    assert rollout.adapter is None
    assert "a hook, which cannot be applied to the factors" in caplog.text
    rollout.close()


@pytest.mark.slow
def test_small_updates_reach_a_rollout_in_bfloat16():
    """The effect of the pairs on log-probs, torn where they are merged.

    With the default it is whole but for what bfloat16 keys round.
    """
    model = lora_model(jnp.bfloat16)
    rollouts = [new_rollout(model, lora=mode) for mode in ("auto", "merged")]

    def effects():
        return [exact_logps(model)] + [
            np.concatenate(scores(each, PROMPTS, COMPLETIONS)) for each in rollouts
        ]

    before, pairs = effects(), rescaled(model, 1e-3)
    for each in rollouts:
        each.update_params(pairs, (nnx.LoRAParam,))
    exact, kept, merged = (now - then for now, then in zip(effects(), before, strict=True))
    assert np.abs(exact).max() > 0
    assert np.corrcoef(exact, kept)[0, 1] > 0.9
    assert np.corrcoef(exact, merged)[0, 1] < 0.8
    texts = [text_of(ids) for ids in PROMPTS]
    found = [mismatch_report(each, model, texts) for each in rollouts]
    for report, mode, least, most in zip(
        found, ("adapter", "merged"), (0.999, 0.0), (1.001, 0.95), strict=True
    ):
        assert report.lora is not None
        assert report.lora.mode == mode
        assert least < report.lora.correlation < most
        assert f"LoRA pairs        {mode}: " in str(report)
        assert report.to_dict()["lora"]["mode"] == mode
    for each in rollouts:
        each.close()
