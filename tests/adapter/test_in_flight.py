"""Weights that change while a rollout samples: versions and log-probs of each token, KV memory."""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import pytest
from flax import nnx

from sgljax_engine import InvalidConfigError, SamplingParams
from tests import lora_models
from tests import tunix_reference as ref
from tests.adapter.helpers import (
    MODEL,
    VOCAB_SIZE,
    max_difference,
    new_rollout,
    params_of,
    rollout_config,
    text_of,
)
from tests.geometry import SMALL
from tests.threads import LIMIT_S, gate_steps, running, start, take_steps, wait_for
from tunix_sgljax import VersionedRolloutOutput, create_sgljax_rollout

PROMPTS = ref.make_prompts(VOCAB_SIZE, (3, 7, 5), seed=21)
TEMPERATURE = 0.9


def long_config(**changes):
    fields = {
        "max_tokens_to_generate": 96,
        "temperature": TEMPERATURE,
        "return_logprobs": True,
        "seed": 5,
    }
    return rollout_config(**(fields | changes))


def num_decoded(rollout):
    return rollout.engine.get_internal_state().counters.num_decode_rows


def sample_across_an_update(rollout, other_model):
    """Generates, and updates weights once some tokens are there."""
    return sample_across(rollout, lambda: params_of(other_model))


def sample_across(rollout, make_params):
    """The same with any parameters, made when they are due."""
    engine = gate_steps(rollout.engine)
    before = num_decoded(rollout)
    call = start(lambda: rollout.generate([text_of(ids) for ids in PROMPTS], long_config()))
    while num_decoded(rollout) < before + 3 * len(PROMPTS):
        assert not call.done()
        take_steps(engine)
    assert not call.done()
    with running() if rollout.weight_update_mode == "wait" else contextlib.nullcontext():
        rollout.update_params(make_params())
    return call.result(LIMIT_S)


# ------------------------------------------------------------------ versions and log-probs


def test_versions_of_a_rollout_that_nothing_interrupts(make_rollout, other_model):
    rollout = make_rollout()
    for version in (0, 1):
        output = rollout.generate([text_of(ids) for ids in PROMPTS], rollout_config())
        assert isinstance(output, VersionedRolloutOutput)
        for tokens, versions in zip(output.tokens, output.weight_versions, strict=True):
            assert (versions.shape, versions.dtype) == (tokens.shape, np.int32)
            assert set(versions.tolist()) == {version}
        rollout.update_params(params_of(other_model), (nnx.Param,))


def test_each_token_has_the_log_prob_of_the_weights_that_sampled_it(
    make_rollout, model, other_model
):
    rollout = make_rollout()
    output = sample_across_an_update(rollout, other_model)
    trained = [
        ref.trainer_logps(policy, PROMPTS, output.tokens, temperature=TEMPERATURE)
        for policy in (model, other_model)
    ]
    assert max_difference(*trained) > 0.1  # the two policies can be told apart
    for row, (logps, versions) in enumerate(
        zip(output.logprobs, output.weight_versions, strict=True)
    ):
        assert set(versions.tolist()) == {0, 1}
        assert (np.diff(versions) >= 0).all()
        expected = np.where(versions == 0, trained[0][row], trained[1][row])
        np.testing.assert_allclose(logps, expected, atol=1e-4, rtol=0)


def test_waiting_updates_leave_completions_to_one_policy(make_rollout, other_model):
    rollout = make_rollout(weight_update_mode="wait")
    output = sample_across_an_update(rollout, other_model)
    assert [set(row.tolist()) for row in output.weight_versions] == [{0}] * len(PROMPTS)
    assert rollout.weight_version == 1


def test_in_place_updates_do_not_prefill_again(make_rollout, other_model):
    rollout = make_rollout(weight_update_mode="in_place")
    output = sample_across_an_update(rollout, other_model)
    assert [set(row.tolist()) for row in output.weight_versions] == [{0, 1}] * len(PROMPTS)
    assert rollout.engine.get_internal_state().counters.num_retractions == 0


def test_aborting_updates_cut_completions_short(make_rollout, other_model):
    rollout = make_rollout(weight_update_mode="abort")
    output = sample_across_an_update(rollout, other_model)
    assert all(10 <= len(row) < 96 for row in output.tokens)
    assert [set(row.tolist()) for row in output.weight_versions] == [{0}] * len(PROMPTS)


# ------------------------------------------------------------------ recording


def test_a_thread_records_its_own_outputs(make_rollout):
    rollout = make_rollout()
    text = text_of(PROMPTS[0])
    with rollout.recorded_outputs() as outputs:
        other = start(lambda: rollout.generate(text, rollout_config())).result(LIMIT_S)
        with rollout.recorded_outputs() as inner:
            first = rollout.generate(text, rollout_config())
        second = rollout.generate(text, rollout_config())
    third = rollout.generate(text, rollout_config())
    assert [id(output) for output in inner] == [id(first)]
    assert [id(output) for output in outputs] == [id(second)]
    assert {id(other), id(third)}.isdisjoint(map(id, [*inner, *outputs]))


# ------------------------------------------------------------------ KV memory


def test_kv_memory_is_given_back_between_steps(make_rollout):
    keeping = make_rollout()
    releasing = make_rollout(release_kv_between_steps=True)
    texts = [text_of(ids) for ids in PROMPTS]
    expected = [row.tolist() for row in keeping.generate(texts, rollout_config()).tokens]
    for _ in range(2):
        output = releasing.generate(texts, rollout_config())
        assert [row.tolist() for row in output.tokens] == expected
        assert not releasing.engine.get_internal_state().is_kv_allocated
    assert keeping.engine.get_internal_state().is_kv_allocated


@pytest.mark.parametrize("whose", ["this rollout", "another user of the engine"])
def test_kv_memory_stays_while_requests_run(make_rollout, whose):
    rollout = make_rollout(release_kv_between_steps=True)
    engine = gate_steps(rollout.engine)
    ids = PROMPTS[0].tolist()
    params = SamplingParams(temperature=0, max_new_tokens=96)
    before = num_decoded(rollout)
    long = start(
        (lambda: rollout.generate(text_of(ids), long_config()))
        if whose == "this rollout"
        else (lambda: rollout.engine.generate_requests([ids], params))
    )
    while num_decoded(rollout) < before + 3:
        assert not long.done()
        take_steps(engine)
    one_token = rollout_config(max_tokens_to_generate=1)
    short = start(lambda: rollout.generate(text_of(PROMPTS[1]), one_token))
    wait_for(lambda: engine.get_internal_state().waiting_queue_size == 1)
    take_steps(engine)
    wait_for(short.done)
    assert not long.done()
    assert engine.get_internal_state().is_kv_allocated
    short.result(LIMIT_S)
    long.result(LIMIT_S)
    assert rollout.engine.get_internal_state().is_kv_allocated == (whose != "this rollout")


# ------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"weight_update_mode": "drain"}, r"weight_update_mode.*'retract'.*'drain'"),
        ({"weight_update_mode": None}, r"weight_update_mode.*None"),
        ({"release_kv_between_steps": "yes"}, r"release_kv_between_steps.*'yes'"),
        ({"release_kv_between_steps": 1}, r"release_kv_between_steps.*1"),
    ],
)
def test_bad_options_are_refused(model, options, match):
    for make in (
        functools.partial(new_rollout, model),
        functools.partial(create_sgljax_rollout, model, ref.IntegerTokenizer(), **SMALL),
    ):
        with pytest.raises(InvalidConfigError, match=match):
            make(**options)


# ------------------------------------------------------------------ LoRA pairs in flight


@pytest.mark.parametrize(
    ("mode", "lora"),
    [
        pytest.param("retract", "merged", marks=pytest.mark.slow),
        ("in_place", "adapter"),
    ],
)
def test_lora_pairs_come_in_flight_as_weights_do(mode, lora):
    actor = lora_models.make(MODEL)
    rollout = new_rollout(actor, weight_update_mode=mode, lora=lora)
    rollout.engine  # noqa: B018  built, so that updates count
    rollout.update_params(lora_models.draw(actor, 1))  # the first one compiles
    params = lora_models.draw(actor, 2)
    output = sample_across(rollout, lambda: params)
    assert [set(row.tolist()) for row in output.weight_versions] == [{1, 2}] * len(PROMPTS)
    assert rollout.weight_version == 2
    rollout.close()
