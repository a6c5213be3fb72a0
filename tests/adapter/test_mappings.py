"""Which mapping is used, and that transposes, hooks and wildcards do what Tunix's do."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx
from tunix.generate.mappings import MappingConfig

from sgljax_engine import Rule, WeightSyncError, flatten_named
from tests import tunix_reference as ref
from tests.adapter.helpers import VOCAB_SIZE, named_params, params_of, tokens_of
from tunix_sgljax import mappings

PROMPTS = ref.make_prompts(VOCAB_SIZE, (3, 9), seed=2)

HF_NAMES = {
    "embedder.input_embedding": "model.embed_tokens.weight",
    "final_norm.w": "model.norm.weight",
    "layers.*.input_layernorm.w": "model.layers.*.input_layernorm.weight",
    "layers.*.post_attention_layernorm.w": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.attn.q_proj.w": "model.layers.*.self_attn.q_proj.weight",
    "layers.*.attn.k_proj.w": "model.layers.*.self_attn.k_proj.weight",
    "layers.*.attn.v_proj.w": "model.layers.*.self_attn.v_proj.weight",
    "layers.*.attn.o_proj.w": "model.layers.*.self_attn.o_proj.weight",
    "layers.*.attn.q_norm.w": "model.layers.*.self_attn.q_norm.weight",
    "layers.*.attn.k_norm.w": "model.layers.*.self_attn.k_norm.weight",
    "layers.*.mlp.gate_proj.kernel": "model.layers.*.mlp.gate_proj.weight",
    "layers.*.mlp.up_proj.kernel": "model.layers.*.mlp.up_proj.weight",
    "layers.*.mlp.down_proj.kernel": "model.layers.*.mlp.down_proj.weight",
}
"""A user's mapping in the plain form: names to names."""

TUPLES = {source: (target, (None, "tp")) for source, target in HF_NAMES.items()}
"""The same as Tunix writes it, with a sharding for each."""


@pytest.fixture(scope="module")
def expected(rollout):
    """What `model` generates."""
    return tokens_of(rollout, PROMPTS)


def altered(model, changes):
    """A copy of the model with some parameters changed: a function for names that end so."""
    copy = nnx.clone(model)
    flat = named_params(model)
    for name, array in flat.items():
        for ending, change in changes.items():
            if name.endswith(ending):
                flat[name] = change(array)
    nnx.update(copy, unflatten(flat))
    return copy


def unflatten(flat):
    """Nested dicts as nnx has them, layer numbers as integers."""
    tree = {}
    for name, array in flat.items():
        *path, last = [int(part) if part.isdigit() else part for part in name.split(".")]
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = array
    return tree


def transposed(array):
    return jnp.swapaxes(array, 0, 1)


# ------------------------------------------------------------------ a user's mapping


@pytest.mark.parametrize(("build", "names"), [(dict, HF_NAMES), (MappingConfig, TUPLES)])
def test_users_mapping(make_rollout, model, expected, names, build):
    mapping = build(to_hf_mappings=names)
    rollout = make_rollout(config={"rollout_mapping_config": mapping})
    assert tokens_of(rollout, PROMPTS) == expected
    rollout.update_params(params_of(model), (nnx.Param,))
    assert tokens_of(rollout, PROMPTS) == expected


@pytest.mark.parametrize(
    "key",
    ["kernel", "layers.*.mlp.gate_proj.kernel", "each layer"],
    ids=["last-component", "wildcard", "full-name"],
)
def test_transpose(make_rollout, model, expected, key):
    """Kernels stored [out, in] by the trainer, in the three spellings that Tunix knows."""
    ending = "kernel" if key == "kernel" else "gate_proj.kernel"
    layers = range(model.config.num_layers)
    keys = [f"layers.{i}.mlp.gate_proj.kernel" for i in layers] if key == "each layer" else [key]
    mapping = MappingConfig(
        to_hf_mappings=HF_NAMES, to_hf_transpose_keys=dict.fromkeys(keys, (1, 0))
    )
    actor = altered(model, {ending: transposed})
    rollout = make_rollout(actor, config={"rollout_mapping_config": mapping})
    assert tokens_of(rollout, PROMPTS) == expected
    rollout.update_params(params_of(actor), (nnx.Param,))
    assert tokens_of(rollout, PROMPTS) == expected


def test_hook_after_transpose(make_rollout, model, expected):
    """Stored transposed and 4 times too large from the third row on."""
    width = model.config.hidden_dim
    scale = jnp.where(jnp.arange(width) < 2, 1.0, 4.0)

    def hook(kernel):
        assert kernel.shape == (width, model.config.embed_dim), "the transpose comes first"
        return kernel / scale[:, None]

    key = "layers.*.mlp.down_proj.kernel"
    mapping = {
        "to_hf_mappings": HF_NAMES,
        "to_hf_hook_fns": {key: hook},
        "to_hf_transpose_keys": {key: (1, 0)},
    }
    actor = altered(model, {"down_proj.kernel": lambda x: transposed(x * scale[:, None])})
    rollout = make_rollout(actor, config={"rollout_mapping_config": mapping})
    assert tokens_of(rollout, PROMPTS) == expected
    rollout.update_params(params_of(actor), (nnx.Param,))
    assert tokens_of(rollout, PROMPTS) == expected


def test_an_object_with_the_attributes_is_a_mapping(make_rollout, expected):
    """Tunix calls attributes that are functions."""

    class Mapping:
        @staticmethod
        def to_hf_mappings():
            return HF_NAMES

    rollout = make_rollout(config={"rollout_mapping_config": Mapping()})
    assert tokens_of(rollout, PROMPTS) == expected


def test_an_empty_mapping_is_none(make_rollout, expected):
    """Tunix's recipe with MaxText's model gives one."""
    rollout = make_rollout(config={"rollout_mapping_config": {}})
    assert tokens_of(rollout, PROMPTS) == expected


def test_a_mapping_with_a_gap_names_both_sides(make_rollout):
    names = {k: v for k, v in HF_NAMES.items() if "k_norm" not in k}
    rollout = make_rollout(config={"rollout_mapping_config": {"to_hf_mappings": names}})
    with pytest.raises(WeightSyncError) as caught:
        tokens_of(rollout, PROMPTS)
    for name in ("'layers.1.attn.k_norm.w'", "'model.layers.1.self_attn.k_norm.weight'"):
        assert name in str(caught.value)


def test_a_mapping_to_a_name_that_the_model_lacks(make_rollout):
    names = HF_NAMES | {"final_norm.w": "model.last_norm.weight"}
    rollout = make_rollout(config={"rollout_mapping_config": {"to_hf_mappings": names}})
    with pytest.raises(WeightSyncError, match=r"'final_norm\.w'.*'model\.last_norm\.weight'"):
        tokens_of(rollout, PROMPTS)


def test_a_hook_that_raises_is_named(make_rollout, model):
    def hook(array):
        raise ZeroDivisionError("in the hook")

    mapping = {"to_hf_mappings": HF_NAMES, "to_hf_hook_fns": {"final_norm.w": hook}}
    rollout = make_rollout(config={"rollout_mapping_config": mapping})
    with pytest.raises(WeightSyncError, match=r"'final_norm\.w'.*in the hook"):
        tokens_of(rollout, PROMPTS)


def stacked(params, axis):
    """The parameters with all layers in one array, as scanned models (MaxText's) have them."""
    flat = flatten_named(params)
    layers = range(sum("up_proj" in name for name in flat))
    names = [name for name in flat if name.startswith("layers.0.")]
    stacks = {
        name.replace(".0.", "."): jnp.stack(
            [flat[name.replace(".0.", f".{i}.")] for i in layers], min(axis, flat[name].ndim)
        )
        for name in names
    }
    return {name: x for name, x in flat.items() if not name.startswith("layers.")} | stacks


@pytest.mark.parametrize("axis", [0, 1])
def test_stacked_layers(make_rollout, model, other_model, expected, axis):
    """A trainer whose layers are in one array, marked as Tunix marks them: by their sharding."""
    shapes = {name: x.ndim for name, x in stacked(params_of(model), axis).items()}
    names: dict[str, Any] = {}
    for name, target in HF_NAMES.items():
        if "*" not in name:
            names[name] = target
            continue
        source = name.replace("*.", "")
        sharding: list[str | None] = [None] * shapes[source]
        sharding[min(axis, shapes[source] - 1)] = "layer"
        names[source] = (target, tuple(sharding))
    rollout = make_rollout(
        model,
        config={
            "rollout_mapping_config": {
                "to_hf_mappings": names,
                "preprocess_src_state": functools.partial(_stack_layers, axis=axis),
            }
        },
    )
    assert tokens_of(rollout, PROMPTS) == expected
    rollout.update_params(stacked(params_of(other_model), axis), (nnx.Param,))
    changed = tokens_of(rollout, PROMPTS)
    assert changed != expected
    rollout.update_params(stacked(params_of(model), axis), (nnx.Param,))
    assert tokens_of(rollout, PROMPTS) == expected
    shallow = {
        name: x[:1] if axis == 0 and name.startswith("layers.") else x
        for name, x in stacked(params_of(model), axis).items()
    }
    if axis == 0:
        with pytest.raises(WeightSyncError, match=r"'model\.layers\.1\..*is missing"):
            rollout.update_params(shallow, (nnx.Param,))
        assert tokens_of(rollout, PROMPTS) == expected


def _stack_layers(params, axis):
    """Stacks the actor's own parameters; leaves alone what is stacked already."""
    is_stacked = not any(name.startswith("layers.0.") for name in flatten_named(params))
    return params if is_stacked else stacked(params, axis)


# ------------------------------------------------------------------ a model's own mapping


class ShipsMapping(ref.Qwen3):
    """A model that keeps its last norm halved and says so in the mapping that it ships."""

    @classmethod
    def mapping_for(cls, backend=None):
        assert backend == "sglang_jax"
        hooks = {"final_norm.w": lambda weight: 2 * weight}
        return {"to_hf_mappings": TUPLES, "to_hf_hook_fns": hooks}


def as_class(cls, model, changes):
    actor = altered(model, changes)
    actor.__class__ = cls
    return actor


def test_the_models_own_mapping_is_used(make_rollout, model, expected):
    actor = as_class(ShipsMapping, model, {"final_norm.w": lambda weight: weight / 2})
    rollout = make_rollout(actor)
    assert tokens_of(rollout, PROMPTS) == expected
    rollout.update_params(params_of(actor), (nnx.Param,))
    assert tokens_of(rollout, PROMPTS) == expected


def test_the_users_mapping_wins_over_the_models(make_rollout, model, expected):
    actor = as_class(ShipsMapping, model, {})
    rollout = make_rollout(actor, config={"rollout_mapping_config": {"to_hf_mappings": HF_NAMES}})
    assert tokens_of(rollout, PROMPTS) == expected


# ------------------------------------------------------------------ rules


def test_rules_of_a_mapping():
    def hook(array):
        return array

    mapping = MappingConfig(
        to_hf_mappings={
            "a.*.b.*.w": ("x.*.y.*.weight", (None, None)),
            "c.w": "z.weight",
            "absent.*.w": "never.*.weight",
        },
        to_hf_transpose_keys={"a.*.w": (1, 0), "c.w": (0, 2, 1)},
        to_hf_hook_fns={"a.1.b.3.w": hook},
    )
    rules = mappings.to_rules(mapping, ["a.0.b.2.w", "a.1.b.3.w", "c.w", "unmapped"], "any")
    assert rules == (
        Rule("a.0.b.2.w", "x.0.y.2.weight", (1, 0), None),
        Rule("a.1.b.3.w", "x.1.y.3.weight", (1, 0), hook),
        Rule("c.w", "z.weight", (0, 2, 1), None),
        Rule("absent.*.w", "never.*.weight", None, None),
    )


def test_a_star_stands_for_one_component():
    mapping = MappingConfig(to_hf_mappings={"layers.*.w": "t.*.weight"})
    names = ["layers.0.w", "layers.0.inner.w"]
    assert [rule.source for rule in mappings.to_rules(mapping, names, "any")] == ["layers.0.w"]


def test_a_star_may_stand_for_part_of_a_component():
    """MaxText's flat layers are called layers_0, layers_1."""
    mapping = MappingConfig(to_hf_mappings={"layers_*.mlp.*.w": "layers.*.*.weight"})
    assert mappings.to_rules(mapping, ["layers_12.mlp.up.w"], "any") == (
        Rule("layers_12.mlp.up.w", "layers.12.up.weight"),
    )
