"""LoRA actors: sampling follows the trainer's own forward pass, sync by sync."""

from __future__ import annotations

import types
from typing import get_args

import numpy as np
import pytest
from flax import nnx

from sgljax_engine import InvalidConfigError, WeightSyncError
from tests import inside, lora_models
from tests import tunix_reference as ref
from tests.adapter.helpers import (
    VOCAB_SIZE,
    max_difference,
    new_rollout,
    rollout_config,
    scores,
    text_of,
    tokens_of,
)
from tests.adapter.test_weights import sync_guards
from tunix_sgljax.lora import LoraMode

FILTER = (nnx.LoRAParam,)
NUM_TOKENS = 24
PROMPTS = ref.make_prompts(90, (7, 7, 7), seed=3)
TOLERANCE = 1e-4

FAST = ("gqa2_tied", "all", "merged")
CASES = (
    FAST,
    ("gemma4_shared_keys", "all", "merged"),
    ("gemma2", "all", "adapter"),
    ("gqa4_untied", "mlp", "adapter"),
    ("llama3_untied", "two", "merged"),
    ("gemma_mha", "two", "adapter"),
    ("gemma3", "mlp", "merged"),
    ("gemma4_keys_as_values", "all", "adapter"),
)
"""Each model once; each rule in each mode. Pairs of "all" are such as only Gemma 4 has."""


def cases():
    for case in CASES:
        marks = () if case == FAST else pytest.mark.soak
        yield pytest.param(case, id="-".join(case), marks=marks)
    name, rules = lora_models.WITH_EXPERTS
    yield pytest.param((name, rules, "adapter"), id=f"{name}-adapter", marks=pytest.mark.soak)


@pytest.fixture(scope="module", params=cases())
def case(request):
    """A LoRA model and its rollout."""
    name, rules, mode = request.param
    model = lora_models.make(name, rules)
    rollout = new_rollout(model, rollout_config=config(), lora=mode)
    yield types.SimpleNamespace(model=model, rollout=rollout)
    rollout.close()


def config(**changes):
    fields = {"max_tokens_to_generate": NUM_TOKENS, "return_logprobs": True} | changes
    return rollout_config(**fields)


def check_follows(rollout, model):
    """Greedy tokens, and their log-probs, are the model's own."""
    output = rollout.generate([text_of(ids) for ids in PROMPTS], config())
    regrets = lora_models.regrets(model, PROMPTS, output.tokens)
    logps = ref_logps(model, output.tokens)
    num_compared = 0
    for row, tokens in enumerate(output.tokens):
        # Tunix masks what stands behind a pad id.
        until = int(np.append(tokens == ref.PAD_ID, True).argmax())
        assert regrets[row, :until].max(initial=0.0) < TOLERANCE
        np.testing.assert_allclose(
            output.logprobs[row][:until], logps[row][:until], atol=TOLERANCE, rtol=0
        )
        num_compared += until
    assert num_compared >= NUM_TOKENS
    return [tokens.tolist() for tokens in output.tokens]


def ref_logps(model, tokens):
    """The trainer's log-probs of tokens that may hold the pad id; not to be used behind one."""
    shown = [np.where(row == ref.PAD_ID, 1, row) for row in tokens]
    return ref.trainer_logps(model, PROMPTS, shown, temperature=0.0)


def test_sampling_follows_three_syncs_of_the_pairs_alone(case):
    seen = [check_follows(case.rollout, case.model)]
    for seed in (1, 2, 3):
        state = lora_models.draw(case.model, seed)
        version = case.rollout.weight_version
        with sync_guards():
            case.rollout.update_params(state, FILTER)
        assert case.rollout.weight_version == version + 1
        seen.append(check_follows(case.rollout, case.model))
    assert len({str(tokens) for tokens in seen}) == 4  # each sync changed what is sampled


# ------------------------------------------------------------------ one rollout for what follows


@pytest.fixture(scope="module", params=get_args(LoraMode))
def shared(request):
    """A LoRA model of Qwen3 and its rollout."""
    model = lora_models.make("gqa2_tied")
    rollout = new_rollout(model, lora=request.param)
    rollout.engine  # noqa: B018  built, so that updates count
    yield types.SimpleNamespace(model=model, rollout=rollout)
    rollout.close()


@pytest.fixture
def serving(shared):
    """The rollout with pairs of its own; and what it samples."""
    shared.rollout.update_params(lora_models.draw(shared.model, 1), FILTER)
    return types.SimpleNamespace(
        rollout=shared.rollout, model=shared.model, tokens=tokens_of(shared.rollout, PROMPTS)
    )


Q_PROJ = ("layers", 0, "attn", "q_proj")


def changed(model, **leaves):
    """The pairs of a model with some leaves of one projection replaced, or left out for None."""
    flat = {key: leaf.get_value() for key, leaf in nnx.to_flat_state(lora_models.leaves(model))}
    for name, value in leaves.items():
        flat.pop((*Q_PROJ, name), None)
        if value is not None:
            flat[*Q_PROJ, name] = value
    return {".".join(map(str, key)): value for key, value in flat.items()}


BAD = {
    "half a pair": (
        lambda m: changed(m, w_lora_b=None),
        r"'layers\.0\.attn\.q_proj\.w_lora_b' is missing",
    ),
    "an unknown target": (
        lambda m: changed(m, other_lora_a=np.ones((64, 4), np.float32)),
        r"'layers\.0\.attn\.q_proj\.other_lora_a' belongs to no LoRA pair",
    ),
    "ranks that differ": (
        lambda m: changed(m, w_lora_a=np.ones((64, 3), np.float32)),
        r"q_proj\.w_lora_a' \[64, 3\].*the ranks differ, \[3\] and \[4\]",
    ),
    "a shape that does not fit": (
        lambda m: changed(m, w_lora_a=np.ones((63, 4), np.float32)),
        r"\[63, 4\].*A must be \[64, 4\] and B \[4, 4, 16\]|it is for \[63, 64\], the projection",
    ),
    "integers": (
        lambda m: changed(m, w_lora_a=np.ones((64, 4), np.int32)),
        r"q_proj.*A and B must be of a floating-point type",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_pairs_are_named_and_the_old_ones_serve(serving, name):
    params, message = BAD[name]
    version = serving.rollout.weight_version
    with pytest.raises(WeightSyncError, match=message):
        serving.rollout.update_params(params(serving.model), FILTER)
    assert serving.rollout.weight_version == version
    assert tokens_of(serving.rollout, PROMPTS) == serving.tokens


def test_weights_without_pairs_are_not_made_again(serving):
    """What serves on is the very array that served before; with an adapter, all of the base."""
    runner = inside.runner(serving.rollout.engine)
    before = dict(runner.weights)
    serving.rollout.update_params(lora_models.draw(serving.model, 2), FILTER)
    changed = {name for name, weight in runner.weights.items() if weight is not before[name]}
    if serving.rollout.adapter is None:
        assert changed == {name for name in before if "proj" in name}
    else:
        assert changed == {name for name in before if "lora" in name}


def test_a_whole_state_brings_a_new_base(serving):
    """As with `offload_to_cpu`, which passes all parameters; and then pairs alone go with it."""
    other = lora_models.make("gqa2_tied")
    base = ref.make_tunix_qwen3("gqa2_tied", seed=77)
    nnx.update(other, nnx.state(base, nnx.Param))
    lora_models.draw(other, 3)
    if serving.rollout.adapter is not None:
        with pytest.raises(WeightSyncError, match="lora='adapter' keeps the actor's frozen base"):
            serving.rollout.update_params(nnx.state(other, nnx.Param))
    else:
        serving.rollout.update_params(nnx.state(other, nnx.Param))
        check_follows(serving.rollout, other)
        serving.rollout.update_params(lora_models.draw(other, 4), FILTER)
        check_follows(serving.rollout, other)
        assert serving.rollout.lora_report.base_holder == "the rollout"
    serving.rollout.update_params(nnx.state(serving.model, nnx.Param))
    assert tokens_of(serving.rollout, PROMPTS) == serving.tokens
    assert serving.rollout.lora_report.base_holder == "the actor"


def test_a_failed_update_is_forgotten(serving):
    """What it brought completes no later one."""
    broken = {".".join(map(str, k)): v.get_value() for k, v in _flat(serving.model)}
    broken["layers.0.mlp.up_proj.kernel"] = np.ones((3, 3), np.float32)
    with pytest.raises(WeightSyncError):
        serving.rollout.update_params(broken)
    serving.rollout.update_params(lora_models.leaves(serving.model), FILTER)
    assert tokens_of(serving.rollout, PROMPTS) == serving.tokens


def _flat(model):
    return nnx.to_flat_state(nnx.state(model, nnx.Param))


def test_scores_follow_too(serving):
    completions = ref.make_prompts(VOCAB_SIZE, (16, 16, 16), seed=4)
    expected = ref.trainer_logps(serving.model, PROMPTS, completions)
    assert max_difference(scores(serving.rollout, PROMPTS, completions), expected) < TOLERANCE


def test_a_sleeping_engine_takes_pairs(serving):
    engine = serving.rollout.engine
    levels = (1, 2) if serving.rollout.adapter is None else (1,)  # 2 would give the base up
    for level in levels:
        engine.sleep(level=level)
        serving.rollout.update_params(lora_models.draw(serving.model, 5 + level), FILTER)
        engine.wake_up(["kv_cache"])
        check_follows(serving.rollout, serving.model)


def test_a_deleted_base_is_an_error():
    model = lora_models.make("gqa2_tied")
    rollout = new_rollout(model)
    tokens_of(rollout, PROMPTS)
    model.layers[0].attn.q_proj.w.get_value().delete()
    with pytest.raises(WeightSyncError, match=r"frozen base.*'layers\.0\.attn\.q_proj\.w'"):
        rollout.update_params(lora_models.draw(model, 1), FILTER)
    rollout.close()


# ------------------------------------------------------------------ the scale


def test_a_scale_given_wins(serving):
    rollout = new_rollout(serving.model, lora_scaling=0.5)
    tokens = tokens_of(rollout, PROMPTS)
    rollout.close()
    halved = lora_models.make(
        "gqa2_tied", [{"module_path": ".*(attn|mlp).*", "rank": 4, "alpha": 2.0}]
    )
    nnx.update(halved, lora_models.leaves(serving.model))
    other = new_rollout(halved)
    assert tokens_of(other, PROMPTS) == tokens != serving.tokens
    other.close()


def test_a_configs_scale_counts(serving):
    config = rollout_config(rollout_sglang_jax_lora_scaling=2.0)  # as the rule says
    rollout = new_rollout(serving.model, rollout_config=config)
    assert tokens_of(rollout, PROMPTS) == serving.tokens
    rollout.close()


def test_a_scale_that_nothing_tells_is_never_guessed():
    model = lora_models.make("gqa2_tied")
    bare = nnx.clone(model)
    bare.__class__ = type(model)._unquantized_type
    with pytest.raises(InvalidConfigError, match=r"lora_scaling=.*lora_scaling.*apply_lora"):
        new_rollout(bare)
    for bad in (float("nan"), "2", True):
        with pytest.raises(InvalidConfigError, match="lora_scaling must be None or a finite"):
            new_rollout(model, lora_scaling=bad)
    with pytest.raises(InvalidConfigError, match="lora must be one of"):
        new_rollout(model, lora="mixed")


@pytest.mark.slow
def test_a_quantised_base_is_read_in_floating_point():
    model = lora_models.make("llama3_untied", weight_qtype="int8")
    lora_models.draw(model, 1)
    rollout = new_rollout(model)
    check_follows(rollout, model)
    pairs = lora_models.draw(model, 2)
    with sync_guards():
        rollout.update_params(pairs, FILTER)
    check_follows(rollout, model)
    rollout.update_params(nnx.state(model, nnx.Param))
    check_follows(rollout, model)
    rollout.close()
