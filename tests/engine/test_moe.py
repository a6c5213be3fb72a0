"""Engines with experts: loading their weights, and tokens that no request has."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from sgljax_engine import (
    Engine,
    EngineConfig,
    LoraRule,
    Rule,
    SamplingParams,
    WeightSyncError,
    hf_rules,
    logical_rules,
)
from sgljax_engine.builder.group import build_shapes
from sgljax_engine.layers.experts import mix
from sgljax_engine.models import mixture
from sgljax_engine.runner.warmup import warm_calls
from tests.engine.models import (
    GPT_OSS,
    NEW_FAMILIES,
    TINY_MOE,
    logical_weights,
    random_prompts,
    spread_weights,
)
from tests.geometry import SMALL

# ------------------------------------------------------------------ weights


def fused(weights):
    """The weights as the memory of transformers 5 has them: stacked, gate and up in one."""
    kept = {name: w for name, w in weights.items() if ".experts." not in name}
    layers = sorted({name.split(".experts.")[0] for name in weights if ".experts." in name})
    for layer in layers:

        def stack(projection, layer=layer):
            pattern = re.compile(rf"{re.escape(layer)}\.experts\.(\d+)\.{projection}\.weight")
            found = {int(m[1]): w for name, w in weights.items() if (m := pattern.fullmatch(name))}
            return np.stack([found[i] for i in range(len(found))])

        both = np.concatenate([stack("gate_proj"), stack("up_proj")], axis=1)
        kept[f"{layer}.experts.gate_up_proj"] = both
        kept[f"{layer}.experts.down_proj"] = stack("down_proj")
    return kept


@pytest.mark.slow
@pytest.mark.parametrize("donate", [pytest.param(False, marks=pytest.mark.soak), True])
def test_updates_in_each_form(donate):
    model = dataclasses.replace(TINY_MOE, num_layers=1)
    first, second = (spread_weights(model, seed) for seed in (0, 1))
    logical = logical_weights(model, 1)
    with Engine(model_config=model, weights=first, **SMALL) as engine:
        before = engine.get_weights_checksum()
        engine.update_weights(second, donate=donate, verify=True)
        after = engine.get_weights_checksum()
        assert set(before.values()).isdisjoint(after.values())
        for weights, rules in (
            (fused(second), None),
            (logical, logical_rules(model)),
        ):
            engine.update_weights(first, donate=donate)
            assert engine.get_weights_checksum() == before
            engine.update_weights(weights, rules, donate=donate, verify=True)
            assert engine.get_weights_checksum() == after
            assert engine.find_differing_weights(weights, rules) == []
        bad = second | {"model.layers.0.mlp.experts.5.up_proj.weight": np.full((24, 32), np.nan)}
        with pytest.raises(WeightSyncError, match=r"model\.layers\.0\.mlp\.experts\.up_proj"):
            engine.update_weights(bad, donate=donate)
        assert engine.get_weights_checksum() == after


UP = "model.layers.1.mlp.experts.{}.up_proj.weight"
STACK = r"model\.layers\.1\.mlp\.experts\.up_proj\.weight' \[8, 32, 24\]"


def without(*experts):
    return lambda weights: [weights.pop(UP.format(expert)) for expert in experts]


def also(expert, shape=(24, 32), dtype="float32"):
    return lambda weights: weights.update({UP.format(expert): np.zeros(shape, dtype)})


def with_whole(weights):
    weights["model.layers.1.mlp.experts.gate_up_proj"] = np.zeros((8, 48, 32), np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(2), STACK + r" lacks index\(es\) \[2\] of its 8"),
        (without(*range(8)), STACK + " is missing"),
        (also(8), r"experts\.8\.up_proj\.weight' is beyond the 8 indices of .*" + STACK),
        (also("07"), r"experts\.7\.up.* and .*experts\.07\.up.* both map to index 7 of"),
        (also("x"), r"experts\.x\.up_proj\.weight' \[24, 32\] is mapped by no rule"),
        (also(3, (24, 31)), r"experts\.3\..* and .*experts\.0\..* differ: \[24, 31\] .*\[24, 32\]"),
        (also(3, dtype="float16"), r"differ: \[24, 32\] float16 and \[24, 32\] float32"),
        (with_whole, r"gate_up_proj' and .*experts\.0\.gate_proj.* both map to"),
    ],
    ids=["missing", "all missing", "extra", "twice", "no index", "shape", "dtype", "both forms"],
)
def test_experts_that_do_not_fit_are_named(change, message):
    weights = spread_weights(TINY_MOE)
    change(weights)
    with pytest.raises(WeightSyncError, match=message):
        Engine(model_config=TINY_MOE, weights=weights, **SMALL)


def test_parts_that_cannot_be_cut_are_named():
    weights = fused(spread_weights(TINY_MOE))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    weights[name] = weights[name][:, :47]
    with pytest.raises(WeightSyncError, match=r"gate_up_proj' \[8, 47, 32\] cannot be cut into"):
        Engine(model_config=TINY_MOE, weights=weights, **SMALL)


@pytest.mark.parametrize("form", ["alone", "fused"])
def test_lora_pairs_of_experts_are_refused(form):
    weights = spread_weights(TINY_MOE)
    name = UP.format(0)
    if form == "fused":
        weights, name = fused(weights), "model.layers.1.mlp.experts.gate_up_proj"
    shape = weights[name].shape
    pair = {"a": np.zeros((*shape[:-1], 2), np.float32), "b": np.zeros((2, shape[-1]), np.float32)}
    axes = tuple(range(len(shape) - 1))
    rules = (*hf_rules(TINY_MOE), LoraRule(name, "a", "b", 1.0, axes))
    with pytest.raises(WeightSyncError, match="a LoRA pair"):
        Engine(model_config=TINY_MOE, weights=weights | pair, weight_rules=rules, **SMALL)


def test_sources_with_unlike_rules_are_refused():
    weights = spread_weights(TINY_MOE)
    odd = UP.format(4)
    stack = odd.replace(".4.", ".")
    rules = (Rule(odd, stack, None, into=4), *hf_rules(TINY_MOE))
    weights[odd] = np.ascontiguousarray(weights[odd].T)
    with pytest.raises(WeightSyncError, match=r"experts\.4\..* have unlike rules"):
        Engine(model_config=TINY_MOE, weights=weights, weight_rules=rules, **SMALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "projection"),
    [
        (GPT_OSS, "mlp.router"),
        (GPT_OSS, "self_attn.o_proj"),
        pytest.param(NEW_FAMILIES["mixtral"], "mlp.gate", marks=pytest.mark.soak),
        pytest.param(NEW_FAMILIES["olmo"], "self_attn.q_proj", marks=pytest.mark.soak),
        pytest.param(NEW_FAMILIES["smollm"], "self_attn.k_proj", marks=pytest.mark.soak),
    ],
)
def test_adapters_are_as_if_merged(model, projection):
    """Beside a router's bias, an attention with sinks, norms of all heads together."""
    rng, name = np.random.default_rng(0), f"model.layers.0.{projection}.weight"
    weights, prompts = logical_weights(model), random_prompts(4, 5, 30)
    num_in, num_out = weights[name].shape
    a, b = rng.normal(0, 0.5, (num_in, 4)), rng.normal(0, 0.5, (4, num_out))
    pair = {"a": a.astype(np.float32), "b": b.astype(np.float32)}
    rules = (*logical_rules(model), LoraRule(name, "a", "b", 1.0))
    options = {**SMALL, "max_loras": 1, "max_lora_rank": 4}
    greedy = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    with Engine(
        model_config=model, weights=weights, weight_rules=logical_rules(model), **options
    ) as engine:
        plain = engine.generate_requests(prompts, greedy)
        engine.load_adapter("one", pair, rules)
        found = engine.generate_requests(prompts, greedy, lora="one")
        engine.update_weights(weights | pair, rules)
        merged = engine.generate_requests(prompts, greedy)
    assert [each.output_ids for each in found] == [each.output_ids for each in merged]
    assert [each.output_ids for each in found] != [each.output_ids for each in plain]
    for ours, theirs in zip(found, merged, strict=True):
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


# ------------------------------------------------------------------ padding


def test_every_program_says_which_tokens_are_used(monkeypatch):
    said: list[bool] = []

    def watched(x_TD, routing, experts, is_used, *kernels):
        said.append(is_used is not None and is_used.shape == x_TD.shape[:1])
        return mix(x_TD, routing, experts, is_used, *kernels)

    monkeypatch.setattr(mixture, "mix", watched)
    model = dataclasses.replace(TINY_MOE, vocab_size=120)  # that no other test has traced
    config = EngineConfig.from_options({**SMALL, "max_model_len": 64})  # no engine, only its traces
    runner, _ = build_shapes(model, config, "float32", None)
    state = runner.kv_memory.state(runner.weights)
    for call in warm_calls(runner, frozenset({"score"})):
        before = len(said)
        runner.programs.lower(call, state)
        assert (len(said) > before) == (call.name in ("decode", "prefill", "score")), call.name
    assert all(said)


@pytest.mark.soak
def test_bfloat16_follows_float32():
    """It runs on XLA's loop over blocks."""
    weights, prompts = spread_weights(TINY_MOE), random_prompts(4, 30, 40)
    scores = []
    for dtype in ("float32", "bfloat16"):
        with Engine(model_config=TINY_MOE, weights=weights, dtype=dtype, **SMALL) as engine:
            scores.append(np.concatenate(engine.score(prompts)))
    # Rounded inputs of a router may choose other experts: nearly all tokens agree.
    assert np.median(np.abs(scores[0] - scores[1])) < 0.3
    assert np.corrcoef(scores)[0, 1] > 0.9


# ------------------------------------------------------------------ sizes
