"""Rules, plans, transformation, loading: what fits is exact, what does not is named."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine import (
    Engine,
    InvalidConfigError,
    LoraRule,
    Rule,
    SamplingParams,
    WeightLoadError,
    WeightSyncError,
    flatten_named,
    hf_rules,
    load_model_config,
    model_config_from_hf,
)
from sgljax_engine.builder.sources import dummy_weights
from sgljax_engine.models.registry import get_model
from sgljax_engine.weights.apply import apply
from sgljax_engine.weights.checks import await_source
from sgljax_engine.weights.forms import Form
from sgljax_engine.weights.lora import LoraTerm, merge_on_host
from sgljax_engine.weights.plan import WeightPlanner, plan_sync
from sgljax_engine.weights.rules import RuleTable
from sgljax_engine.weights.served import ServedSource
from sgljax_engine.weights.specs import TargetSpec, source_spec
from tests import inside
from tests.compilation import recorded_programs
from tests.engine.models import TINY, spread_weights
from tests.geometry import SMALL

GOLDEN = Path(__file__).parents[1] / "golden"
GREEDY = SamplingParams(temperature=0, max_new_tokens=8)


def target(shape, *, form=Form.LOGICAL, alias="", dtype=jnp.float32):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return TargetSpec(shape, jnp.dtype(dtype), form, sharding, alias)


def sync(source, rules, targets):
    return apply(plan_sync(source_spec(source), rules, targets), source)


def match(rules, name):
    return RuleTable(rules).match(name)


def fits(source, name):
    """Whether a rule's source matches a name."""
    pattern = source.replace(".", r"\.").replace("**", ".+").replace("*", "[^.]+")
    return re.fullmatch(pattern, name) is not None


class TestRules:
    def target(self, rules, name):
        (found,) = match(rules, name)
        return found.target

    def test_wildcards_match_one_component(self):
        rules = [Rule("layers.*.mlp.*.w", "model.layers.*.*.weight"), Rule("skip.*", None)]
        assert self.target(rules, "layers.12.mlp.up.w") == "model.layers.12.up.weight"
        assert match(rules, "layers.1.2.mlp.up.w") == []
        assert self.target(rules, "skip.this") is None
        assert match(rules, "layersX1Xmlp.up.w") == []

    def test_double_wildcards_match_any_number(self):
        rules = [Rule("vision.**", None), Rule("a.*.**.w", "b.*.*")]
        assert self.target(rules, "vision.x") is None
        assert self.target(rules, "vision.x.0.y") is None
        assert match(rules, "vision") == match(rules, "the.vision.x") == []
        assert self.target(rules, "a.0.x.y.w") == "b.0.x.y"

    def test_many_rules_are_found_as_if_tried_in_turn(self):
        """With and without wildcards, whole and in parts, several of each for the same names."""
        rng = np.random.default_rng(0)
        words = ("a", "b", "0", "*", "**")
        for _ in range(200):
            rules = [
                Rule(
                    ".".join(rng.choice(words, rng.integers(1, 4))),
                    (None, "x.*", "y")[rng.integers(3)],
                    part=(None, None, 0, 1)[rng.integers(4)],
                    is_shared=bool(rng.integers(4) == 0),
                )
                for _ in range(12)
            ]
            table = RuleTable(rules)
            for length in (1, 2, 3):
                for name in map(".".join, itertools.product(words[:3], repeat=length)):
                    sources = [rule.source for rule in rules if fits(rule.source, name)]
                    same = [rule for rule in rules if sources and rule.source == sources[0]]
                    ends = [
                        i for i, rule in enumerate(same) if rule.part is None and not rule.is_shared
                    ]
                    expected = same[: ends[0] + 1] if ends else same
                    found = table.match(name)
                    assert [each.rule for each in found] == expected
                    assert table.ignores(name) == bool(found and found[0].target is None)

    def test_rules_of_a_large_multimodal_model_are_looked_up(self):
        """No regular expression for each pair of a rule and a name: that took two minutes."""
        path = Path(__file__).parents[1] / "real_configs" / "gemma-4-31b.json"
        model = model_config_from_hf(json.loads(path.read_text()))
        rules = hf_rules(model)
        specs = list(get_model(model.architecture).param_specs(model))
        names = [name.replace("model.", "model.language_model.", 1) for name in specs]
        assert len(rules) > 2000
        assert len(names) > 800
        table = RuleTable(rules)
        assert len(table._patterns) < 20
        assert [match.target for name in names for match in table.match(name)] == specs
        assert table.ignores("model.vision_tower.encoder.layers.0.mlp.weight")
        assert not table.ignores("model.language_model.norm.weight")

    def test_flatten_named(self):
        tree = {"a": [np.zeros(1), {"b": np.ones(2)}], "c.d": np.zeros(3)}
        assert list(flatten_named(tree)) == ["a.0", "a.1.b", "c.d"]

    def test_flatten_named_refuses_ambiguous_names(self):
        with pytest.raises(WeightSyncError, match=r"both called 'a\.b'"):
            flatten_named({"a": {"b": np.ones(1)}, "a.b": np.ones(1)})
        with pytest.raises(WeightSyncError, match="must be named, got a bare ndarray"):
            flatten_named(np.ones(1))

    def test_flatten_named_finds_the_names_of_a_structure_once(self, monkeypatch):
        def tree(value):
            return {"once": [np.full(1, value), {"b": np.full(2, value)}]}

        flatten_named(tree(0))
        monkeypatch.delattr(jax.tree_util, "tree_flatten_with_path")
        flat = flatten_named(tree(1))
        assert list(flat) == ["once.0", "once.1.b"]
        assert all(np.all(array == 1) for array in flat.values())


class TestApply:
    def test_transpose_hook_reshape_and_cast(self):
        x = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
        rules = [Rule("x", "y", (2, 0, 1), lambda a: a * 2)]
        made = sync({"x": x}, rules, {"y": target((5, 12), dtype="bfloat16")})
        expected = (x.transpose(2, 0, 1) * 2).reshape(5, 12).astype(jnp.bfloat16)
        assert made["y"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(made["y"]), expected)

    def test_alias_names_the_target(self):
        made = sync(
            {"x": np.ones(2)}, [Rule("x", "norm.scale")], {"n": target((2,), alias="norm.scale")}
        )
        np.testing.assert_array_equal(made["n"], [1, 1])

    def test_never_aliases_the_source(self):
        source = {"x": jnp.arange(8.0).reshape(2, 4), "y": jnp.ones((4, 4))}
        targets = {"x": target((2, 4)), "y": target((4, 4))}
        made = sync(source, [Rule("*", "*")], targets)
        for name, array in made.items():
            assert array.unsafe_buffer_pointer() != source[name].unsafe_buffer_pointer()
            source[name].delete()
        np.testing.assert_array_equal(made["x"], np.arange(8.0).reshape(2, 4))

    def test_a_plan_refuses_another_source(self):
        plan = plan_sync(source_spec({"x": np.ones(2)}), [Rule("x", "x")], {"x": target((2,))})
        with pytest.raises(WeightSyncError, match="changed"):
            apply(plan, {"x": np.ones(3)})

    def test_plan_runs_again_without_compiling(self):
        plan = plan_sync(source_spec({"x": jnp.ones(2)}), [Rule("x", "x")], {"x": target((2,))})
        sources = [jnp.full(2, value) for value in (1.0, 2.0)]
        apply(plan, {"x": sources[0]})
        with recorded_programs() as lowered:
            made = apply(plan, {"x": sources[1]})
        np.testing.assert_array_equal(made["x"], [2.0, 2.0])
        assert not lowered


class TestKnownPlan:
    """What an update repeats if only the values of its source are new."""

    @staticmethod
    def num_calls(num_weights: int) -> int:
        """Calls of Python functions in weights/ for the second update of so many weights."""
        planner = WeightPlanner({f"t{i}": target((2, 4)) for i in range(num_weights)})
        served, rules, count = ServedSource(), (Rule("s*", "t*"),), 0

        def note(frame: Any, event: str, _: Any) -> None:
            nonlocal count
            count += event == "call" and "sgljax_engine/weights/" in frame.f_code.co_filename

        for watch in (None, note):
            source = {f"s{i}": jnp.full((2, 4), float(i)) for i in range(num_weights)}
            before = sys.getprofile()
            sys.setprofile(watch)
            try:
                plan, arrays = planner.plan(source, rules)
                await_source(arrays)
                apply(served.changed(plan, arrays), arrays)
                served.remember(plan, arrays)
            finally:
                sys.setprofile(before)
        return count

    def test_asks_little_of_each_weight(self):
        few, many = self.num_calls(8), self.num_calls(16)
        assert 0 < many - few <= 8


FORMS = (Form.LOGICAL, Form.PANELS, Form.TABLE_PANELS)
LAYERS = {f"model.layers.{i}.w": target((5, 12), form=form) for i, form in enumerate(FORMS)}


class TestStackedLayers:
    """Layers in one array, as scanned models have them."""

    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_each_layer_is_taken_from_its_place(self, axis):
        layers = np.random.default_rng(0).normal(size=(3, 3, 4, 5)).astype(np.float32)
        stack = np.stack(list(layers), axis)
        rule = Rule("layers.w", "model.layers.*.w", (2, 0, 1), part="each", part_axis=axis)
        made = sync({"layers.w": stack}, [rule], LAYERS)
        for i, layer in enumerate(layers):
            expected = layer.transpose(2, 0, 1).reshape(5, 12)
            stored = FORMS[i].restore(made[f"model.layers.{i}.w"], (5, 12))
            np.testing.assert_array_equal(stored, expected)

    @pytest.mark.parametrize("depth", [2, 4])
    def test_another_depth_is_named(self, depth):
        stack = np.zeros((depth, 5, 12), np.float32)
        message = {
            2: r"'model\.layers\.2\.w' \[5, 12\] is missing from the source",
            4: r"'layers\.w' maps to 'model\.layers\.3\.w', which the model does not have",
        }
        with pytest.raises(WeightSyncError, match=message[depth]):
            sync(
                {"layers.w": stack},
                [Rule("layers.w", "model.layers.*.w", part="each")],
                LAYERS,
            )

    def test_an_axis_that_is_not_there_is_named(self):
        rule = Rule("layers.w", "model.layers.*.w", part="each", part_axis=3)
        with pytest.raises(WeightSyncError, match=r"'layers\.w' \[3, 5, 12\] is mapped by no rule"):
            sync({"layers.w": np.zeros((3, 5, 12), np.float32)}, [rule], LAYERS)

    def test_the_stack_is_not_copied(self):
        stack = jnp.zeros((64, 256, 64))
        targets = {f"model.layers.{i}.w": target((256, 64)) for i in range(64)}
        rule = Rule("layers.w", "model.layers.*.w", part="each")
        plan = plan_sync(source_spec({"layers.w": stack}), [rule], targets)
        program: Any = plan.program.at_target
        memory = program.lower(plan.arrays({"layers.w": stack})).compile().memory_analysis()
        assert memory.temp_size_in_bytes < stack.nbytes / 8


def block_rules(shape: tuple[int, int], axes: tuple[int, int]) -> list[Rule]:
    """Rules for layers in two stacked axes, blocks and layers of a block."""
    return [
        Rule("w", f"{shape[1] * block + layer}.w", (1, 0), part=(block, layer), part_axis=axes)
        for block in range(shape[0])
        for layer in range(shape[1])
    ]


class TestTwoStackedAxes:
    """Layers in two stacked axes, as MaxText scans blocks of layers."""

    @pytest.mark.parametrize("axes", [(0, 1), (1, 2), (2, 0), (-1, 1)])
    def test_each_layer_is_taken_from_its_place(self, axes):
        layers = np.random.default_rng(0).normal(size=(2, 3, 5, 4)).astype(np.float32)
        stack = np.moveaxis(layers, (0, 1), axes)
        targets = {f"{i}.w": target((4, 5), form=FORMS[i % 3]) for i in range(6)}
        made = sync({"w": stack}, block_rules((2, 3), axes), targets)
        for i in range(6):
            stored = FORMS[i % 3].restore(made[f"{i}.w"], (4, 5))
            np.testing.assert_array_equal(stored, layers[divmod(i, 3)].T)

    def test_a_lora_pair_has_one_of_the_axes(self):
        rng = np.random.default_rng(0)
        source = {
            "w": rng.normal(size=(5, 2, 3, 4)).astype(np.float32),
            "a": rng.normal(size=(5, 2, 1)).astype(np.float32),
            "b": rng.normal(size=(1, 3, 4)).astype(np.float32),
        }
        rules = [*block_rules((2, 3), (1, 2)), LoraRule("w", "a", "b", 0.5, (0, 1))]
        made = sync(source, rules, {f"{i}.w": target((4, 5)) for i in range(6)})
        expected = source["w"] + 0.5 * np.tensordot(source["a"], source["b"], 1)
        for i in range(6):
            block, layer = divmod(i, 3)
            np.testing.assert_allclose(
                made[f"{i}.w"], expected[:, block, layer].T, rtol=1e-5, atol=1e-6
            )

    @pytest.mark.parametrize(
        ("rules", "message"),
        [
            (block_rules((2, 2), (1, 2)), r"has 2 x 3 parts, the rules take \[\(0, 0\), \(0, 1\)"),
            (block_rules((2, 3), (1, 4)), r"no axis that all of its rules take parts of: \[\(1, 4"),
            (block_rules((2, 2), (1, -3)), r"no axis that all of its rules take parts of"),
            (
                [Rule("w", "0.w", part=(0,), part_axis=(1, 2))],
                r"index on each of the axes \[1, 2\]",
            ),
            ([Rule("w", "0.w", part=(0, 0), part_axis=(1, 2), num_parts=2)], "cannot be cut"),
        ],
    )
    def test_wrong_parts_are_named(self, rules, message):
        targets = {f"{i}.w": target((4, 5)) for i in range(6)}
        with pytest.raises(WeightSyncError, match=message):
            sync({"w": np.zeros((5, 2, 3, 4), np.float32)}, rules, targets)


class TestSharedSource:
    """One source for two targets, as an embedding that is also the head."""

    RULES = (
        Rule("table", "embedding", is_shared=True),
        Rule("table", "head", hook=lambda x: jax.lax.reduce_precision(x, 8, 7)),
    )

    def test_each_target_has_its_own_hook(self):
        table = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
        made = sync(
            {"table": table}, self.RULES, {"embedding": target((6, 4)), "head": target((6, 4))}
        )
        np.testing.assert_array_equal(made["embedding"], table)
        rounded = table.astype(jnp.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(made["head"], rounded)
        assert (rounded != table).any()

    def test_a_target_that_is_not_there_is_named(self):
        with pytest.raises(WeightSyncError, match="'table' maps to 'head', which the model does"):
            sync({"table": np.zeros((6, 4))}, self.RULES, {"embedding": target((6, 4))})


FUSED_RULES = (
    Rule("w", "k", (1, 0, 2), part=0),
    Rule("w", "v", (1, 0, 2), part=1),
    Rule("v", "norm"),
    LoraRule("w", "a", "b", 2.0, (2,)),
)
FUSED = {
    "k": target((6, 20)),
    "v": target((6, 20), dtype="bfloat16"),
    "norm": target((20,)),
}
BAD_PAIRS = {
    "no weight": (("w",), {}, "the LoRA pair of 'w' lacks w"),
    "half a pair": (("b",), {}, "the LoRA pair of 'w' lacks b"),
    "another rank": ((), {"b": (2, 2, 4, 5)}, r"the ranks differ, \[3\] and \[2\]"),
    "another shape": (
        (),
        {"a": (5, 3)},
        r"shapes do not fit, A must be \[6, 3\] and B \[3, 2, 4, 5\]",
    ),
}


class TestLora:
    """Pairs of a source; what Tunix's actors have is in tests/adapter/test_lora.py."""

    def source(self):
        rng = np.random.default_rng(1)
        shapes = {"w": (2, 4, 6, 5), "a": (6, 3), "b": (3, 2, 4, 5), "v": (4, 5)}
        return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}

    def test_parts_of_a_fused_weight(self):
        source = self.source()
        made = sync(source, FUSED_RULES, FUSED)
        whole = source["w"] + 2.0 * np.einsum("dr,rckh->ckdh", source["a"], source["b"])
        k, v = (part.transpose(1, 0, 2).reshape(6, 20) for part in whole)
        np.testing.assert_allclose(made["k"], k, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(made["v"], v.astype(jnp.bfloat16), rtol=1e-2)
        np.testing.assert_array_equal(made["norm"], source["v"].reshape(20))

    def test_the_sum_is_made_in_float32(self):
        """A small change of a bfloat16 weight is not lost before the cast."""
        source = {
            "w": jnp.ones((4, 4), jnp.bfloat16),
            "a": jnp.full((4, 1), 2.0**-6, jnp.bfloat16),
            "b": jnp.full((1, 4), 2.0**-6, jnp.bfloat16),
        }
        rules = [Rule("w", "w"), LoraRule("w", "a", "b", 1.0)]
        made = sync(source, rules, {"w": target((4, 4))})
        np.testing.assert_array_equal(made["w"], np.full((4, 4), 1 + 2.0**-12, np.float32))

    def test_layers_that_are_stacked_have_pairs_of_their_own(self):
        """As MaxText's scan stacks them: on axis 1, with heads as axes of W and not of A and B."""
        rng = np.random.default_rng(2)
        shapes = {"q": (6, 3, 2, 5), "qa": (6, 3, 4), "qb": (4, 3, 10)}
        shapes |= {"o": (2, 3, 5, 6), "oa": (10, 3, 4), "ob": (4, 3, 6)}
        source = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        rules = [
            Rule("q", "*.q", None, None, "each", 1),
            Rule("o", "*.o", None, None, "each", 1),
            LoraRule("q", "qa", "qb", 2.0, (0,), (1,), is_merged=True),
            LoraRule("o", "oa", "ob", 0.5, (0, 2), (1,), is_merged=True),
        ]
        targets = {f"{i}.q": target((6, 10)) for i in range(3)}
        targets |= {f"{i}.o": target((10, 6)) for i in range(3)}
        made = sync(source, rules, targets)
        for i in range(3):
            q = source["q"][:, i].reshape(6, 10) + 2.0 * source["qa"][:, i] @ source["qb"][:, i]
            o = source["o"][:, i].reshape(10, 6) + 0.5 * source["oa"][:, i] @ source["ob"][:, i]
            np.testing.assert_allclose(made[f"{i}.q"], q, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(made[f"{i}.o"], o, rtol=1e-5, atol=1e-5)

    def test_a_stack_that_is_not_taken_apart(self):
        rng = np.random.default_rng(3)
        shapes = {"w": (3, 4, 5), "a": (4, 3, 2), "b": (2, 3, 5)}
        source = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        pair = LoraRule("w", "a", "b", 2.0, (1,), (0,))
        made = sync(source, [Rule("w", "w"), pair], {"w": target((3, 4, 5))})
        whole = source["w"] + 2.0 * np.einsum("isr,rso->sio", source["a"], source["b"])
        np.testing.assert_allclose(made["w"], whole, rtol=1e-5, atol=1e-5)
        term = LoraTerm("a", "b", 2.0, (1,), (0,))
        on_host = merge_on_host(source["w"], source["a"], source["b"], term)
        np.testing.assert_allclose(on_host, whole, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize(
        ("rule", "message"),
        [
            (
                LoraRule("q", "a", "b", 1.0, (0,), (1,), is_merged=True),
                r"A must be \[6, 3, 4\] and B \[4, 3, 10\]",
            ),
            (LoraRule("q", "a", "b", 1.0, (0,), (1,)), r"and B \[4, 3, 2, 5\]"),
            (LoraRule("q", "a", "b", 1.0, (0,), (0,)), r"axes \[0, 0\] are no axes of it"),
            (LoraRule("q", "a", "b", 1.0, (0,), (4,)), r"axes \[0, 4\] are no axes of it"),
        ],
    )
    def test_pairs_that_do_not_fit_stacked_layers_are_named(self, rule, message):
        shapes = {"q": (6, 3, 2, 5), "a": (6, 3, 4), "b": (4, 3, 9)}
        source = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        rules = [Rule("q", "*.q", None, None, "each", 1), rule]
        with pytest.raises(WeightSyncError, match=message):
            sync(source, rules, {f"{i}.q": target((6, 10)) for i in range(3)})

    @pytest.mark.parametrize("name", BAD_PAIRS)
    def test_what_does_not_fit_is_named(self, name):
        left_out, shapes, message = BAD_PAIRS[name]
        source = {n: x for n, x in self.source().items() if n not in left_out}
        source |= {n: np.zeros(shape, np.float32) for n, shape in shapes.items()}
        with pytest.raises(WeightSyncError, match=message):
            sync(source, FUSED_RULES, FUSED)

    def test_bad_axes_and_a_second_pair_are_named(self):
        for rule, message in (
            (LoraRule("w", "a", "b", 2.0, (1, 0)), r"in_axes \(1, 0\) are no ascending axes"),
            (LoraRule("w", "a", "b", 2.0, (4,)), r"in_axes \(4,\) are no ascending axes"),
            (LoraRule("w", "a", "b", 2.0, (2,)), "'w' has two LoRA pairs"),
        ):
            rules = [*FUSED_RULES, rule] if "two" in message else [*FUSED_RULES[:-1], rule]
            with pytest.raises(WeightSyncError, match=message):
                sync(self.source(), rules, FUSED)

    def test_a_pair_of_a_weight_that_is_ignored(self):
        source = {"w": np.ones((2, 2), np.float32), "v": np.ones(2, np.float32)}
        source |= {"a": np.ones((2, 1), np.float32), "b": np.ones((1, 2), np.float32)}
        rules = [Rule("w", None), Rule("v", "v"), LoraRule("w", "a", "b", 1.0)]
        with pytest.raises(WeightSyncError, match="'w' has a LoRA pair, but a rule ignores it"):
            sync(source, rules, {"v": target((2,))})


class TestPlanErrors:
    CASES = (
        ({}, [], {"w": (2,)}, ["parameter 'w' [2] is missing"]),
        ({"v": (2,)}, [Rule("w", "w")], {"w": (2,)}, ["'v' [2] is mapped by no rule", "'w'"]),
        ({"v": (2,)}, [Rule("v", "u")], {"w": (2,)}, ["'v' maps to 'u', which the model"]),
        (
            {"a": (2,), "b": (2,)},
            [Rule("*", "w")],
            {"w": (2,)},
            ["'b' and 'a' both map to 'w'"],
        ),
        (
            {"w": (2, 3)},
            [Rule("w", "w")],
            {"w": (3, 2)},
            ["'w' [2, 3] for 'w' [3, 2]: shapes do not fit; with transpose=(1, 0) they do"],
        ),
        (
            {"w": (2, 3, 4)},
            [Rule("w", "a", (1, 0), lambda x: x[:1], 0), Rule("w", "b", part=1)],
            {"a": (3, 4), "b": (12,)},
            ["shapes do not fit (after part 0 and transpose (1, 0) and hook: [1, 3])"],
        ),
        ({"w": (6,)}, [Rule("w", "w")], {"w": (5,)}, ["'w' [6] for 'w' [5]"]),
        (
            {"w": (2, 3)},
            [Rule("w", "w", (1, 0))],
            {"w": (2, 3)},
            ["(after transpose (1, 0): [3, 2]); without the transpose they do, see logical_rules"],
        ),
        ({"w": (2, 3)}, [Rule("w", "w", (0,))], {"w": (2, 3)}, ["'w' [2, 3]"]),
        (
            {"w": (2,)},
            [Rule("w", "w", None, lambda x: x["no"])],
            {"w": (2,)},
            ["'w' [2] for 'w' [2]"],
        ),
        (
            {"w": (3, 2)},
            [Rule("w", "a", part=0), Rule("w", "b", part=2)],
            {"a": (2,), "b": (2,)},
            ["'w' [3, 2] has 3 parts, the rules take [0, 2]"],
        ),
        (
            {"w": (2, 2)},
            [Rule("w", "a", part=0), Rule("w", "b", part=0)],
            {"a": (2,), "b": (2,)},
            ["'w' [2, 2] has 2 parts, the rules take [0, 0]"],
        ),
        (
            {"w": (1, 2)},
            [Rule("w", "a", part=0), Rule("w", "b")],
            {"a": (2,), "b": (1, 2)},
            ["'w' [1, 2] is mapped both whole and in parts"],
        ),
        (
            {"w": (2, 3)},
            [Rule("w", "a", part=0), Rule("w", None, part=1)],
            {"a": (2,)},
            ["'w' [2, 3] for 'a' [2]: shapes do not fit (after part 0: [3])"],
        ),
    )

    @pytest.mark.parametrize(("source", "rules", "targets", "messages"), CASES)
    def test_names_the_problem(self, source, rules, targets, messages):
        arrays = {name: np.ones(shape, np.float32) for name, shape in source.items()}
        specs = {name: target(shape) for name, shape in targets.items()}
        with pytest.raises(WeightSyncError) as caught:
            plan_sync(source_spec(arrays), rules, specs)
        for message in messages:
            assert message in str(caught.value)

    def test_lists_every_problem_at_once(self):
        source = source_spec({f"s{i}": np.ones(i + 1) for i in range(5)})
        with pytest.raises(WeightSyncError) as caught:
            plan_sync(source, [], {f"t{i}": target((1,)) for i in range(5)})
        for i in range(5):
            assert f"'s{i}'" in str(caught.value)
            assert f"'t{i}'" in str(caught.value)

    def test_a_leaf_that_is_no_array(self):
        with pytest.raises(WeightSyncError, match="'w' must be an array, got str"):
            source_spec({"w": "weights"})


class TestEngineUpdate:
    @pytest.fixture
    def engine(self):
        with Engine(model_config=TINY, weights=spread_weights(), **SMALL) as engine:
            yield engine

    def run(self, engine):
        return engine.generate_requests([[1, 2, 3]], GREEDY)[0]

    def test_source_that_fails_to_compute_keeps_serving(self, engine):
        """It is computed in the background, like a trainer's step that is not awaited."""
        before = self.run(engine)
        fails = threading.Event()

        def norm(_: Any) -> np.ndarray:
            if fails.is_set():
                raise RuntimeError("planted")
            return np.ones(TINY.hidden_size, np.float32)

        spec = jax.ShapeDtypeStruct((TINY.hidden_size,), jnp.float32)
        compute = jax.jit(lambda x: jax.pure_callback(norm, spec, x))
        slow = jax.jit(lambda x: jnp.linalg.matrix_power(x, 1 << 12)[0, 0])
        compute(slow(jnp.eye(1000))).block_until_ready()  # both are compiled
        fails.set()
        bad = compute(slow(jnp.eye(1000)))  # not refused here: its argument is not there
        with pytest.raises(WeightSyncError, match=r"(?s)computing the new weights .* planted"):
            engine.update_weights(spread_weights(seed=1) | {"model.norm.weight": bad})
        assert engine.weight_version == 0
        assert self.run(engine).output_ids == before.output_ids

    def test_a_hook_that_exits_is_answered(self, engine):
        def leave(x: jax.Array) -> jax.Array:
            raise SystemExit("planted")

        weights = spread_weights(seed=1)
        rules = [rule._replace(hook=leave) for rule in hf_rules(TINY)]
        with pytest.raises(SystemExit, match="planted"):
            engine.update_weights(weights, rules)
        self.run(engine)  # the old weights serve


class TestHFFolder:
    @pytest.fixture
    def folder(self, tmp_path):
        return Path(shutil.copytree(GOLDEN / "qwen3_gqa_tied", tmp_path / "model"))

    def edit(self, folder, name="config.json", **fields):
        config = json.loads((folder / name).read_text())
        for key, value in fields.items():
            if value is None:
                config.pop(key, None)
            else:
                config[key] = value
        (folder / name).write_text(json.dumps(config))

    def test_reads_config_generation_config_and_tokenizer(self, folder):
        with Engine(folder, dtype="float32", **SMALL) as engine:
            assert engine.model_config.eos_token_ids == (1, 4)
            params = engine.get_default_sampling_params()
            assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.95)
            out = engine.generate("hello world", {"temperature": 0, "max_new_tokens": 5})
            assert out["text"]
            assert out["meta_info"]["prompt_tokens"] > 0

    def test_default_sampling_params_are_the_generation_configs(self, folder):
        name = "generation_config.json"
        fields = {"repetition_penalty": 1.1, "top_k": 0, "max_new_tokens": 33, "num_beams": 1}
        self.edit(folder, name, temperature=None, **fields)
        with Engine(folder, dtype="float32", **SMALL) as engine:
            expected = SamplingParams(
                repetition_penalty=1.1, top_k=-1, top_p=0.95, max_new_tokens=33
            )
            assert engine.get_default_sampling_params() == expected
            # They hold for a call that brings none.
            assert len(engine.generate("hello")["output_ids"]) <= 33
        self.edit(folder, name, do_sample=False)
        with Engine(folder, dtype="float32", **SMALL) as engine:
            assert engine.get_default_sampling_params().temperature == 0.0

    def test_broken_json(self, folder):
        (folder / "config.json").write_text("{")
        with pytest.raises(InvalidConfigError, match=r"cannot read .*config.json"):
            Engine(folder)

    def test_missing_shard(self, tmp_path):
        folder = Path(shutil.copytree(GOLDEN / "qwen3_mha_sharded", tmp_path / "model"))
        shard = sorted(folder.glob("model-*.safetensors"))[1]
        shard.unlink()
        with pytest.raises(WeightLoadError, match=f"no such weights file: .*{shard.name}"):
            Engine(folder)

    @pytest.mark.parametrize(
        ("name", "filled"),
        [
            ("qwen2_bias_untied", {"k_proj.bias": 0.0, "norm.weight": 1.0}),
            ("gemma2_window", {"norm.weight": 0.0}),
        ],
    )
    def test_dummy_vectors_change_nothing(self, name, filled):
        """Biases are 0, norms 1, also where they are stored minus one."""
        source = dummy_weights(load_model_config(GOLDEN / name), seed=0)
        for ending, value in filled.items():
            found = [v for key, v in source.arrays.items() if key.endswith(ending)]
            assert found
            assert all((vector == value).all() for vector in found)

    def test_dtype_comes_from_the_checkpoint(self):
        with Engine(GOLDEN / "qwen3_bf16_tied", **SMALL) as engine:
            weights = inside.runner(engine).weights
            assert weights["model.embed_tokens.weight"].dtype == jnp.bfloat16
            assert weights["model.norm.weight"].dtype == jnp.float32
