"""Adapters beside the weights: each request has its own, in one batch, and pays for no other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine import (
    Engine,
    EngineStateError,
    InvalidConfigError,
    InvalidRequestError,
    LoraRule,
    Rule,
    SamplingParams,
    WeightRule,
    WeightSyncError,
    logical_rules,
)
from sgljax_engine.builder.sources import dummy_weights
from tests import inside
from tests.engine.models import TINY, logical_weights
from tests.geometry import SMALL
from tests.threads import LIMIT_S

PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7], [5] * 9, [1, 2, 3, 4, 5]]
GREEDY = SamplingParams(temperature=0, max_new_tokens=8)
KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OPTIONS: dict[str, Any] = {**SMALL, "max_loras": 3, "max_lora_rank": 4}


def shapes():
    """Logical shapes of all projections, by name without ".weight"."""
    source = dummy_weights(TINY, 0).arrays
    return {
        name.removesuffix(".weight"): x.shape
        for name, x in source.items()
        if name.split(".")[-2] in KINDS
    }


def make_adapter(seed, rank=4, kinds=KINDS, scale=0.5):
    """Random pairs, and their rules with those of the weights."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    rules: list[WeightRule] = list(logical_rules(TINY))
    for name, (num_in, num_out) in shapes().items():
        if name.rsplit(".", 1)[-1] not in kinds:
            continue
        arrays[f"{name}.a"] = rng.normal(0, 0.3, (num_in, rank)).astype(np.float32)
        arrays[f"{name}.b"] = rng.normal(0, 0.3, (rank, num_out)).astype(np.float32)
        rules.append(LoraRule(f"{name}.weight", f"{name}.a", f"{name}.b", scale))
    return arrays, tuple(rules)


def make_engine(**options):
    return Engine(
        model_config=TINY,
        weights=logical_weights(TINY),
        weight_rules=logical_rules(TINY),
        **(OPTIONS | options),
    )


def generate(engine, lora, prompts=PROMPTS, params: Any = GREEDY):
    outputs = engine.generate(
        input_ids=prompts, sampling_params=params, lora=lora, return_logprob=True
    )
    return [(out["output_ids"], _logprobs(out)) for out in outputs]


def _logprobs(out):
    return [entry[0] for entry in out["meta_info"]["output_token_logprobs"]]


def check_same(found, expected):
    for (ids, logprobs), (want_ids, want_logprobs) in zip(found, expected, strict=True):
        assert ids == want_ids
        np.testing.assert_allclose(logprobs, want_logprobs, atol=1e-4)


@pytest.fixture(scope="module")
def plain():
    """Without adapters, for those that are merged into its weights."""
    with make_engine(max_loras=0) as engine:
        yield engine


def generate_merged(plain, adapter):
    """What comes of an adapter that is merged into the weights."""
    arrays, rules = adapter
    plain.update_weights(logical_weights(TINY) | arrays, rules)
    return generate(plain, None)


@pytest.fixture(scope="module")
def merged(plain):
    """What engines with the adapters merged into their weights generate, by seed; None for none."""
    outputs: dict[int | None, Any] = {None: generate_merged(plain, ({}, logical_rules(TINY)))}
    for seed in (1, 2, 3):
        outputs[seed] = generate_merged(plain, make_adapter(seed))
    assert len({str(out) for out in outputs.values()}) == 4
    return outputs


@pytest.fixture(scope="module")
def shared():
    engine = make_engine()
    yield engine
    engine.shutdown()


@pytest.fixture
def engine(shared):
    """With adapters "one" and "two"; none other."""
    for name in shared.get_internal_state().adapters:
        shared.unload_adapter(name)
    shared.load_adapter("one", *make_adapter(1))
    shared.load_adapter("two", *make_adapter(2))
    yield shared
    shared.check_integrity()


def test_each_adapter_is_as_if_merged(engine, merged):
    check_same(generate(engine, "one"), merged[1])
    check_same(generate(engine, "two"), merged[2])
    check_same(generate(engine, None), merged[None])


def test_rows_of_different_adapters_share_a_batch(engine, merged):
    engine.load_adapter("three", *make_adapter(3))
    mixed = generate(engine, ["one", None, "three", "two"])
    expected = [merged[1][0], merged[None][1], merged[3][2], merged[2][3]]
    check_same(mixed, expected)


def test_loading_one_counts_as_waking(engine):
    before = engine.get_internal_state().counters.wake_s
    engine.sleep()
    engine.load_adapter("one", *make_adapter(1))
    assert engine.get_internal_state().counters.wake_s > before
    engine.wake_up()


def test_prompt_logprobs_of_adapters_are_their_own(engine):
    """The same prompt is scored once for each adapter, also when they start together."""

    def prompt_logprobs(loras):
        outputs = engine.generate(
            input_ids=[PROMPTS[0]] * len(loras),
            sampling_params=GREEDY,
            lora=loras,
            return_logprob=True,
            logprob_start_len=0,
        )
        return [[entry[0] for entry in out["meta_info"]["input_token_logprobs"]] for out in outputs]

    alone = [prompt_logprobs([lora])[0] for lora in ("one", "two", None)]
    assert len({str(each) for each in alone}) == 3
    assert prompt_logprobs(["one", "two", None, "one"]) == [*alone, alone[0]]


def test_prefixes_of_adapters_are_their_own(engine, merged):
    """The same prompt, cached under one, is never matched under another."""
    for _ in range(2):
        for name, seed in (("one", 1), ("two", 2), (None, None)):
            check_same(generate(engine, name, PROMPTS[2:3]), merged[seed][2:3])
    again = engine.generate(input_ids=PROMPTS[2], sampling_params=GREEDY, lora="one")
    assert again["meta_info"]["cached_tokens"] > 0


def test_another_adapter_of_the_same_name(engine, merged):
    version = engine.weight_version
    assert engine.load_adapter("one", *make_adapter(3)) == version + 1
    check_same(generate(engine, "one"), merged[3])
    check_same(generate(engine, "two"), merged[2])


def test_an_adapter_is_loaded_as_a_version(engine, merged):
    version = engine.weight_version + 4
    assert engine.load_adapter("one", *make_adapter(3), version=version) == version
    with pytest.raises(InvalidRequestError, match=f"serving version {version}, got {version}$"):
        engine.load_adapter("one", *make_adapter(1), version=version)
    check_same(generate(engine, "one"), merged[3])
    assert engine.load_adapter("one", *make_adapter(1), version=version, reload=True) == version
    check_same(generate(engine, "one"), merged[1])


def test_a_smaller_adapter_leaves_nothing_of_the_one_before(engine, plain):
    small = make_adapter(7, rank=1, kinds=("gate_proj",))
    engine.load_adapter("one", *small)
    check_same(generate(engine, "one"), generate_merged(plain, small))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", pytest.param("xla", marks=pytest.mark.soak)])
def test_the_only_slot_holds_one_adapter_after_another(merged, backend):
    """It is not written into beside others, and never is the memory that the adapter came in."""
    with make_engine(max_loras=1, linear_backend=backend, attention_backend=backend) as engine:
        for seed in (1, 2):
            arrays, rules = make_adapter(seed)
            on_device = jax.tree.map(jnp.asarray, arrays)
            engine.load_adapter("policy", on_device, rules)
            for array in on_device.values():
                array.delete()
            check_same(generate(engine, "policy"), merged[seed])
        few = make_adapter(1, kinds=("q_proj", "v_proj"), rank=2)
        engine.load_adapter("policy", *few)
        found = generate(engine, "policy")
    with make_engine(max_loras=3) as other:
        other.load_adapter("few", *few)
        check_same(found, generate(other, "few"))


def test_scores_are_an_adapters(engine, merged):
    for name, seed in (("one", 1), (None, None), ("two", 2)):
        for prompt, (ids, logprobs) in zip(PROMPTS, merged[seed], strict=True):
            (scores,) = engine.score([[*prompt, *ids]], start_lens=[len(prompt)], lora=name)
            np.testing.assert_allclose(scores, logprobs, atol=1e-4)


@pytest.mark.slow
def test_nothing_is_compiled_for_other_adapters():
    engine = make_engine(forbid_compile=True)
    engine.warmup(include_score=True)
    before = engine.get_internal_state().num_compiles
    for seed in (1, 2, 3):
        engine.load_adapter(f"adapter {seed}", *make_adapter(seed))
        generate(engine, f"adapter {seed}")
        engine.score(PROMPTS, lora=f"adapter {seed}")
    engine.unload_adapter("adapter 2")
    engine.load_adapter("adapter 4", *make_adapter(2, rank=2))
    generate(engine, ["adapter 1", "adapter 4", None, "adapter 3"])
    assert engine.get_internal_state().num_compiles == before
    engine.shutdown()


# ------------------------------------------------------------------ with updates and sleep


def test_adapters_outlive_weight_updates(engine, merged):
    weights = logical_weights(TINY)
    other = {name: x * 0.5 if "down_proj" in name else x for name, x in weights.items()}
    engine.update_weights(other, logical_rules(TINY))
    assert generate(engine, "one")[0] != merged[1][0]
    engine.update_weights(weights, logical_rules(TINY))
    check_same(generate(engine, "one"), merged[1])


def test_adapters_outlive_a_donating_update(engine, merged):
    engine.update_weights(logical_weights(TINY), logical_rules(TINY), donate=True)
    check_same(generate(engine, "two"), merged[2])


def test_adapters_sleep_and_wake(engine, merged):
    engine.sleep(preserve_state=True)
    engine.wake_up()
    check_same(generate(engine, "one"), merged[1])


def test_an_adapter_comes_while_the_engine_sleeps(engine, merged):
    engine.sleep()
    engine.load_adapter("one", *make_adapter(3))
    assert engine.get_internal_state().asleep == ("kv_cache",)
    engine.wake_up()
    check_same(generate(engine, "one"), merged[3])
    check_same(generate(engine, "two"), merged[2])


def test_an_adapter_that_is_refused_wakes_nothing(engine, merged):
    arrays, rules = make_adapter(3)
    spoilt = {name: np.full_like(x, np.nan) for name, x in arrays.items()}
    engine.sleep()
    with pytest.raises(WeightSyncError, match="14 of 14 new weights hold NaN"):
        engine.load_adapter("one", spoilt, rules)
    assert engine.get_internal_state().asleep == ("weights", "kv_cache")
    engine.wake_up()
    check_same(generate(engine, "one"), merged[1])


def test_weights_come_while_adapters_sleep(engine, merged):
    engine.sleep()
    engine.update_weights(logical_weights(TINY), logical_rules(TINY))
    engine.wake_up()
    check_same(generate(engine, "one"), merged[1])


def test_level_two_is_refused_with_adapters(engine, merged):
    with pytest.raises(EngineStateError, match="would give up the adapters 'one', 'two'"):
        engine.sleep(level=2)
    assert not engine.is_sleeping()
    check_same(generate(engine, "one"), merged[1])


def test_checkpoints_name_adapters(engine, merged, tmp_path):
    """A request goes on with its adapter elsewhere, and is refused where that is not loaded."""
    engine.pause_generation("retract")
    stream = engine.generate(
        input_ids=PROMPTS[0], sampling_params=GREEDY, lora="one", stream=True, rid="saved"
    )
    engine.save_checkpoint(tmp_path)
    engine.abort_request("saved")
    engine.continue_generation()
    assert list(stream)
    other = make_engine(adapters={"two": make_adapter(2), "one": make_adapter(1)})
    output = other.restore_checkpoint(tmp_path)["saved"].result(LIMIT_S)
    assert output.output_ids == merged[1][0][0]
    other.unload_adapter("one")
    with pytest.raises(InvalidRequestError, match="lora 'one' is not loaded"):
        other.restore_checkpoint(tmp_path)["saved"].result(LIMIT_S)
    other.shutdown()


# ------------------------------------------------------------------ bad input


def test_unknown_adapters_are_named(engine):
    message = r"lora 'three' is not loaded; loaded: 'one', 'two'"
    with pytest.raises(InvalidRequestError, match=message):
        generate(engine, "three")
    with pytest.raises(InvalidRequestError, match=message):
        engine.score(PROMPTS, lora="three")
    with pytest.raises(InvalidRequestError, match=message):
        engine.unload_adapter("three")
    for bad in (5, ""):
        with pytest.raises(InvalidRequestError, match="lora must be None or an adapter's name"):
            generate(engine, bad)
    with pytest.raises(InvalidRequestError, match="name must be a string"):
        engine.load_adapter("", *make_adapter(1))


def test_an_adapter_in_use_is_not_unloaded(engine, merged):
    engine.pause_generation("in_place")
    stream = engine.generate(
        input_ids=PROMPTS[0], sampling_params=GREEDY, lora="one", stream=True, rid="user"
    )
    message = r"'one' cannot be unloaded: 1 unfinished request\(s\) use it, 'user' among them"
    with pytest.raises(EngineStateError, match=message):
        engine.unload_adapter("one")
    engine.continue_generation()
    ids = [token for piece in stream for token in piece["output_ids"]]
    assert ids[-len(merged[1][0][0]) :] == merged[1][0][0]
    engine.unload_adapter("one")
    assert engine.get_internal_state().adapters == ("two",)


def test_there_are_only_so_many_slots(engine, merged):
    engine.load_adapter("three", *make_adapter(3))
    with pytest.raises(EngineStateError, match="'four' finds no slot: max_loras is 3, taken by"):
        engine.load_adapter("four", *make_adapter(1))
    engine.unload_adapter("one")
    engine.load_adapter("four", *make_adapter(1))
    check_same(generate(engine, "four"), merged[1])


BAD = {
    "a rank above the maximum": (
        make_adapter(1, rank=5),
        r"has rank 5, but max_lora_rank of the engine is 4",
    ),
    "no pair": (({}, tuple(logical_rules(TINY))), "there is no LoRA rule"),
    "a weight without slots": (
        (
            {"a": np.ones((8, 1), np.float32), "b": np.ones((1, 8), np.float32)},
            (*logical_rules(TINY), LoraRule("model.norm.weight", "a", "b", 1.0)),
        ),
        r"maps to 'model\.norm\.weight', which has no adapter slots",
    ),
    "another shape": (
        (
            {"a": np.ones((8, 1), np.float32), "b": np.ones((1, 8), np.float32)},
            (
                Rule("x", "model.layers.0.mlp.up_proj.weight"),
                LoraRule("x", "a", "b", 1.0),
            ),
        ),
        r"it is for \[8, 8\], the projection is \[\d+, \d+\]",
    ),
    "a hook": (
        (
            {"a": np.ones((8, 1), np.float32), "b": np.ones((1, 8), np.float32)},
            (
                Rule("x", "model.layers.0.mlp.up_proj.weight", hook=lambda x: x),
                LoraRule("x", "a", "b", 1.0),
            ),
        ),
        "its rule has a hook",
    ),
}

LAYER = "base_model.model.model.layers.0"
OTHER_LEAVES = {
    "a magnitude of DoRA": f"{LAYER}.mlp.up_proj.lora_magnitude_vector",
    "a trained bias": f"{LAYER}.self_attn.q_proj.bias",
    "a bias that a rule maps": "model.layers.0.input_layernorm.weight",
    "a module that is saved whole": "base_model.model.lm_head.modules_to_save.weight",
    "a pair without a rule": f"{LAYER}.mlp.up_proj.lora_A.weight",
}
"""Leaves of PEFT's adapters beside the pairs that rules name."""


@pytest.mark.parametrize("kind", OTHER_LEAVES)
def test_leaves_of_no_pair_are_refused(engine, merged, kind):
    """They are trained too; without them the adapter would be another one."""
    arrays, rules = make_adapter(2)
    leaf, version = OTHER_LEAVES[kind], engine.weight_version
    arrays[leaf] = np.ones(32, np.float32)
    with pytest.raises(WeightSyncError, match=rf"'{leaf}' is of no LoRA pair"):
        engine.load_adapter("one", arrays, rules)
    assert engine.weight_version == version
    check_same(generate(engine, "one", PROMPTS[:1]), merged[1][:1])
    if kind == "a pair without a rule":
        engine.load_adapter("one", arrays, (Rule(leaf, None), *rules))
        check_same(generate(engine, "one"), merged[2])


@pytest.mark.parametrize("name", BAD)
def test_adapters_that_do_not_fit_are_named(engine, merged, name):
    (arrays, rules), message = BAD[name]
    version = engine.weight_version
    with pytest.raises(WeightSyncError, match=message):
        engine.load_adapter("one", arrays, rules)
    assert engine.weight_version == version
    check_same(generate(engine, "one", PROMPTS[:1]), merged[1][:1])


def test_engines_without_adapters_refuse_them(plain):
    with pytest.raises(EngineStateError, match="the engine was made with max_loras=0"):
        plain.load_adapter("one", *make_adapter(1))
    with pytest.raises(InvalidRequestError, match="lora 'one' is not loaded; loaded: none"):
        generate(plain, "one")
    assert not any("lora" in name for name in inside.runner(plain).weights)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_loras": -1}, "max_loras"),
        ({"max_lora_rank": 0}, "max_lora_rank"),
        ({"lora_targets": ("qkv",)}, "lora_targets must be None or some of"),
        ({"max_loras": 1, "lora_targets": ()}, "lora_targets must be None or some of"),
        ({"max_loras": 0, "adapters": {"x": make_adapter(1)}}, "holds 1, but max_loras is 0"),
        ({"adapters": {"": make_adapter(1)}}, "adapters must have names"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(InvalidConfigError, match=message):
        make_engine(**options)


def test_first_adapters_and_few_targets(merged, plain):
    """An engine may start with adapters; projections that none may change have no room."""
    kinds = ("gate_proj", "down_proj")
    adapter = make_adapter(4, kinds=kinds)
    engine = make_engine(lora_targets=kinds, adapters={"first": adapter})
    assert engine.weight_version == 0
    slots = [name for name in inside.runner(engine).weights if name.endswith(".lora_a")]
    assert len(slots) == 2 * TINY.num_layers
    check_same(generate(engine, "first"), generate_merged(plain, adapter))
    check_same(generate(engine, None), merged[None])
    with pytest.raises(WeightSyncError, match=r"q_proj.*no adapter slots.*down_proj, gate_proj"):
        engine.load_adapter("second", *make_adapter(1))
    engine.shutdown()
