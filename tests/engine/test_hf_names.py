"""Weights by Hugging Face's names: without rules they are in its orientation, square ones too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine import (
    Engine,
    Rule,
    SamplingParams,
    hf_rules,
    load_model_config,
    logical_rules,
)
from sgljax_engine.models.registry import get_model
from sgljax_engine.placement.submeshes import place
from sgljax_engine.weights.apply import apply
from sgljax_engine.weights.forms import Form
from sgljax_engine.weights.hf_layout import find_weight_files
from sgljax_engine.weights.loader import read_hf_folder
from sgljax_engine.weights.plan import plan_sync
from sgljax_engine.weights.specs import source_spec
from tests.engine.models import TINY, logical_weights, spread_weights
from tests.geometry import SMALL
from tests.tiers import tiered

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = ["qwen2_bias_untied", "qwen3_gqa_tied", "gemma3_window", "llama_scaled_untied"]
"""Those with a square projection."""
FAST = ("qwen3_gqa_tied",)

OPTIONS: dict[str, Any] = {**SMALL, "dtype": "float32"}
SQUARE = "model.layers.0.self_attn.k_proj.weight"
WIDE = "model.layers.0.mlp.up_proj.weight"


def greedy(engine, golden):
    prompts = [golden[f"prompt_{i}"].tolist() for i in range(2)]
    return engine.generate_requests(
        prompts, SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    )


@pytest.fixture(scope="module")
def engine():
    with Engine(model_config=TINY, weights=spread_weights(), **OPTIONS) as engine:
        yield engine


@pytest.mark.parametrize("name", tiered(FOLDERS, FAST, []))
def test_transformers_weights_come_out_right(name):
    """Against what transformers computes with them, from the start and after an update."""
    folder, golden = GOLDEN / name, np.load(GOLDEN / name / "golden.npz")
    weights = read_hf_folder(find_weight_files(folder))
    assert any(
        key.endswith("_proj.weight") and array.shape[0] == array.shape[1]
        for key, array in weights.items()
    )
    noise = {key: array + np.float32(0.1) for key, array in weights.items()}
    with Engine(model_config=load_model_config(folder), weights=noise, **OPTIONS) as engine:
        assert greedy(engine, golden)[0].output_ids != golden["greedy_0"][:12].tolist()
        engine.update_weights(weights, verify=True)
        for i, out in enumerate(greedy(engine, golden)):
            assert out.output_ids == golden[f"greedy_{i}"][:12].tolist()
            np.testing.assert_allclose(out.logprobs, golden[f"greedy_logps_{i}"][:12], atol=1e-4)
        assert engine.find_differing_weights(weights) == []
        assert engine.find_differing_weights(folder) == []


def test_what_a_checkpoint_carries_beside_is_ignored():
    folder = GOLDEN / "qwen3_gqa_tied"
    weights = read_hf_folder(find_weight_files(folder))
    beside = {
        "lm_head.weight": weights["model.embed_tokens.weight"],
        "model.layers.1.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
    }
    with Engine(folder, **OPTIONS) as engine:
        assert engine.update_weights(weights | beside) == 1
        assert engine.find_differing_weights(weights) == []


@pytest.mark.slow
def test_both_orientations_have_rules(engine):
    assert spread_weights()[SQUARE].shape == logical_weights()[SQUARE].shape
    assert engine.find_differing_weights(logical_weights(), logical_rules(TINY)) == []
    engine.update_weights(logical_weights(seed=1), logical_rules(TINY))
    assert engine.find_differing_weights(spread_weights(seed=1)) == []
    # The same in the other orientation is another weight: shapes do not tell.
    name = SQUARE
    mixed = spread_weights(seed=1) | {name: logical_weights(seed=1)[name]}
    assert engine.find_differing_weights(mixed) == [name]
    with Engine(
        model_config=TINY, weights=logical_weights(), weight_rules=logical_rules(TINY), **OPTIONS
    ) as other:
        assert other.find_differing_weights(spread_weights()) == []


def test_rules_can_be_extended(engine):
    """A model that stores one parameter otherwise keeps the rest."""
    weights = spread_weights(seed=2)
    halved = weights | {"final": weights["model.norm.weight"] / 2}
    del halved["model.norm.weight"]
    rules = [Rule("final", "model.norm.weight", hook=lambda x: 2 * x), *hf_rules(TINY)]
    engine.update_weights(halved, rules)
    assert engine.find_differing_weights(weights) == []


class TestPairs:
    @pytest.mark.parametrize(
        "given",
        [
            lambda weights: weights.items(),
            lambda weights: ((name, jnp.asarray(array)) for name, array in weights.items()),
        ],
        ids=["items", "generator"],
    )
    def test_are_taken(self, engine, given):
        version = engine.weight_version
        weights = spread_weights(seed=3 + version)
        assert engine.update_weights(given(weights)) == version + 1
        assert engine.find_differing_weights(given(weights)) == []

    def test_from_the_start(self):
        pairs = list(spread_weights().items())
        with Engine(model_config=TINY, weights=pairs, **OPTIONS) as engine:
            assert engine.find_differing_weights(spread_weights()) == []


def test_an_update_by_these_names_copies_once():
    """XLA removes both transposes, the rules' and the engine's own."""
    targets = place(TINY, None, "float32").whole.weight_targets(
        get_model(TINY.architecture).param_specs(TINY)
    )
    if targets[WIDE].form is Form.LOGICAL:
        pytest.skip("the engine stores projections as they come on this platform")
    source = {name: jnp.asarray(array) for name, array in spread_weights().items()}
    plan = plan_sync(source_spec(source), hf_rules(TINY), targets)
    program: Any = plan.program.at_target
    text = program.lower(plan.arrays(source)).compile().as_text()
    assert " transpose(" not in text
    assert jax.tree.all(jax.tree.map(lambda a, b: a.size == b.size, apply(plan, source), source))
